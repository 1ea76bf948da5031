"""GGUF to model folder: same logits as the model the file came from."""

import json
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_gguf import (
    SIZES,
    byte_level_vocabulary,
    random_model,
    write_gguf,
)
from transformers import AutoModelForCausalLM

from outrider.checkpoints.gguf import convert_gguf
from outrider.checkpoints.gguf.header import STORAGE, read_header, storage_of

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
THETA = 500000.0


def llama3_divisors() -> np.ndarray:
    """As llama.cpp's converter computes them, frequency by frequency."""
    out = []
    for i in range(SIZES["head_dim"] // 2):
        wavelength = 2 * np.pi * THETA ** (2 * i / SIZES["head_dim"])
        if wavelength < 8192 / 4.0:
            out.append(1.0)
        elif wavelength > 8192 / 1.0:
            out.append(8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            out.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(out, dtype=np.float32)


def windowed(writer):
    writer.add_sliding_window(8)


def gemma2_extras(writer):
    windowed(writer)
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(3.0)


def gemma3_extras(writer):
    windowed(writer)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def llama3_extras(writer):
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_tensor("rope_freqs.weight", llama3_divisors())


def yarn_extras(writer):
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama": ("llama", {}, None),
    "llama-untied": ("llama", {"tie_word_embeddings": False}, None),
    "llama-biases": ("llama", {"attention_bias": True}, None),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}}, llama3_extras),
    "mistral": ("mistral", {"sliding_window": 8}, windowed),
    "qwen2": ("qwen2", {}, None),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE}, yarn_extras),
    "qwen3": ("qwen3", {}, None),
    "gemma": ("gemma", {}, None),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        gemma2_extras,
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE},
        gemma3_extras,
    ),
}


@torch.no_grad()
def logits(model):
    ids = torch.arange(40)[None] * 7 % model.config.vocab_size
    return model(ids).logits


@pytest.mark.parametrize("case", CASES)
def test_the_folder_gives_the_logits_of_the_model_the_file_came_from(case, tmp_path):
    model_type, options, extra = CASES[case]
    model = random_model(model_type, **options)
    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    back, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=2e-5)


def test_config_states_the_shape_in_hugging_face_terms(tmp_path, tiny):
    convert_gguf(tiny[0], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in SIZES} == SIZES
    assert config["rms_norm_eps"] == 1e-5
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(byte_level_vocabulary()[0]) + 3  # from the tensor, padding included
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [2, 0]  # its own first, then <|endoftext|>, which llama.cpp stops at, too


def test_storage_types_are_those_of_the_gguf_package():
    for kind in gguf.GGMLQuantizationType:
        assert storage_of(int(kind)) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    assert storage_of(max(gguf.GGMLQuantizationType) + 1) is None
    assert len(STORAGE) == 11


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_blocks_come_out_bit_for_bit(kind, tmp_path):
    model = random_model("llama")
    write_gguf(tmp_path / "m.gguf", model, kind=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    raw = next(t for t in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors if t.name == "blk.1.ffn_down.weight").data
    decode = by_hand_q8_0 if kind == gguf.GGMLQuantizationType.Q8_0 else by_hand_q4_1
    assert weights[name].dtype == np.float32
    np.testing.assert_array_equal(weights[name], decode(raw.tobytes()).reshape(weights[name].shape))


def by_hand_q4_1(data: bytes) -> np.ndarray:
    """Blocks of 32: scale and minimum as halves, then 16 bytes; low nibbles first."""
    out = []
    for at in range(0, len(data), 20):
        d, m = (np.float32(x) for x in struct.unpack_from("<ee", data, at))
        quants = data[at + 4 : at + 20]
        out += [d * np.float32(q & 15) + m for q in quants] + [d * np.float32(q >> 4) + m for q in quants]
    return np.array(out, dtype=np.float32)


def by_hand_q8_0(data: bytes) -> np.ndarray:
    """Blocks of 32: scale as a half, then 32 signed bytes."""
    out = []
    for at in range(0, len(data), 34):
        (d,) = struct.unpack_from("<e", data, at)
        out += [np.float32(d) * np.float32(q) for q in struct.unpack_from("<32b", data, at + 2)]
    return np.array(out, dtype=np.float32)


def test_large_models_are_cut_into_files_with_an_index(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("outrider.checkpoints.gguf.convert.SHARD_BYTES", 60_000)
    convert_gguf(tiny[0], tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert set(held) == {name for name, place in index["weight_map"].items() if place == file}
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 60_000
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(logits(back), logits(tiny[1]), rtol=0, atol=0)


def test_progress_advances_with_every_tensor(tmp_path, tiny):
    calls = []

    class Noting:
        def start(self, label, total):
            calls.append(("start", total))

        def advance(self, amount):
            calls.append(("advance", amount))

        def done(self):
            calls.append(("done", 0))

    convert_gguf(tiny[0], tmp_path / "out", Noting())
    count = len(read_header(tiny[0]).tensors)
    assert calls == [("start", count)] + [("advance", 1)] * count + [("done", 0)]
