"""GGUF to model folder: same logits as the model the file came from, same tokens as llama.cpp's definition."""

import json
import random
import struct
from itertools import pairwise

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.numpy import load_file
from tiny_gguf import (
    SIZES,
    TEXT,
    add_tensor,
    add_vocabulary,
    byte_level_vocabulary,
    finish,
    random_model,
    tiny_llama,
    write_gguf,
)
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.checkpoints.gguf import convert_gguf
from outrider.checkpoints.gguf.header import STORAGE, read_header, storage_of
from outrider.core.errors import ConfigError, FetchError

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


@pytest.fixture
def tiny(tmp_path):
    """A tiny llama as GGUF, and the model it came from."""
    file = tmp_path / "tiny.gguf"
    return file, tiny_llama(file)


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


# --- tokenizers ---------------------------------------------------------------------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# llama.cpp's patterns, as its vocabulary code lists them for each name
LLAMA_CPP = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
SAMPLES = [
    *TEXT,
    "12345 and 3.14159, x2 y33 z444",
    "  spaces   before\n\n\tand  after  ",
    "don't we'LL they've I'M",
    "naïve café 東京 🎉 ½ ٣٤ Ⅷ",
    "for i in range(10):\r\n    print(i ** 2)  # ok!!\n",
    "a\u00a0b <=> $9.99 ^~| ...",
]


def byte_spelling() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest follow from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def cut(text: str, patterns: list[str]) -> list[str]:
    """Cut by each pattern in turn; what a pattern does not match stays as a piece of its own."""
    pieces = [text]
    for pattern in patterns:
        out = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                out += [piece[at : match.start()], match.group()]
                at = match.end()
            out.append(piece[at:])
        pieces = [piece for piece in out if piece]
    return pieces


def bpe_by_hand(text: str, pre: str) -> list[int]:
    tokens, merges = byte_level_vocabulary()
    ids, ranks = {token: i for i, token in enumerate(tokens)}, {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    out, spelling = [], byte_spelling()
    for piece in cut(text, LLAMA_CPP[pre]):
        symbols = [spelling[b] for b in piece.encode()]
        if pre == "llama-bpe" and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        out += [ids[symbol] for symbol in symbols]
    return out


def with_pre(pre):
    def extra(writer):
        writer.kv_data[0]["tokenizer.ggml.pre"] = gguf.gguf_writer.GGUFValue(pre, gguf.GGUFValueType.STRING)

    return extra


@pytest.fixture(scope="module")
def tiny_model():
    return random_model("llama")


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_byte_level_tokens_are_those_of_llama_cpps_definition(pre, tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=with_pre(pre))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert ids == bpe_by_hand(text, pre), text
        assert tokenizer.decode(ids) == text


def test_smollm_cuts_as_hugging_faces_own_tokenizer_does(tmp_path, tiny):
    convert_gguf(tiny[0], tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in SAMPLES:
        assert ours.encode(text).ids == theirs.encode(text).ids, text


def test_qwen2_composes_accents_first(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=with_pre("qwen2"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("cafe\u0301").ids == tokenizer.encode("caf\u00e9").ids


def test_special_tokens_are_whole_and_the_chat_template_renders(tmp_path, tiny):
    convert_gguf(tiny[0], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<|im_start|>") == [1]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert text == "<|im_start|>the cat<|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    raw = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [raw.encode(sample).ids for sample in SAMPLES] == [tokenizer.encode(sample) for sample in SAMPLES]


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_beginning_and_end_tokens_follow_the_files_flags(bos, eos, tmp_path, tiny_model):
    def extra(writer):
        flags = {"add_bos_token": bos, "add_eos_token": eos}
        for name, flag in flags.items():
            writer.kv_data[0][f"tokenizer.ggml.{name}"] = gguf.gguf_writer.GGUFValue(flag, gguf.GGUFValueType.BOOL)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ids = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("the cat").ids
    assert ids == [1] * bos + bpe_by_hand("the cat", "smollm") + [2] * eos


SPACE = "\u2581"


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Unknown, ends, 256 bytes, pieces of the samples, then single letters; scores fall with the id, as in Llama 2."""
    rng = random.Random(3)
    words = [SPACE + word for text in TEXT for word in text.split()]
    pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, min(len(word), i + 5) + 1)}
    pieces |= {SPACE * 2, SPACE * 3}
    chosen = rng.sample(sorted(pieces), 90)
    letters = sorted({letter for word in words for letter in word} | {SPACE})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *chosen, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(chosen))] + [-1e4 - i for i in range(len(letters))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(chosen) + len(letters))


def sentencepiece_by_hand(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """As llama.cpp does: join the neighbours with the best score, leftmost first; spell out the rest in bytes."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list((" " + text).replace(" ", SPACE))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


def test_sentencepiece_tokens_are_those_of_llama_cpps_definition(tmp_path):
    tokens, scores, kinds = sentencepiece_vocabulary()
    model = random_model("llama", vocab_size=len(tokens))

    def extra(writer):
        for key in ("merges", "pre", "add_bos_token", "token_type", "tokens", "model"):
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)

    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert ids == [1, *sentencepiece_by_hand(text, tokens, scores)], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [("pre", "martian", "martian.*smollm"), ("model", "wordpiece", "wordpiece.*gpt2"), ("pre", "", "does not say how")],
)
def test_unknown_tokenizers_are_refused_with_what_is_read(key, value, complaint, tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0][f"tokenizer.ggml.{key}"] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.STRING)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, complaint)


def test_a_merge_of_what_is_no_token_is_refused(tmp_path, tiny_model):
    def extra(writer):
        value = gguf.gguf_writer.GGUFValue(["t martian"], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
        writer.kv_data[0]["tokenizer.ggml.merges"] = value

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "not made of tokens of the vocabulary: .*martian")


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_lists_of_the_wrong_kind_are_refused(key, tmp_path, tiny_model):
    wrong, kind = (["a"], gguf.GGUFValueType.STRING) if key == "token_type" else ([7, 8], gguf.GGUFValueType.INT32)

    def extra(writer):
        value = gguf.gguf_writer.GGUFValue(wrong, gguf.GGUFValueType.ARRAY, kind)
        writer.kv_data[0][f"tokenizer.ggml.{key}"] = value

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, f"{key} should be a list of")


# --- what is refused ----------------------------------------------------------------------------------------------


def assert_refused(folder, complaint):
    """The file m.gguf is refused with these words, and nothing appears beside it."""
    with pytest.raises(ConfigError, match=complaint):
        convert_gguf(folder / "m.gguf", folder / "out")
    assert [file.name for file in folder.iterdir()] == ["m.gguf"]


def bare(folder, arch="llama"):
    """A writer of a file with a vocabulary and an embedding and nothing else."""
    writer = gguf.GGUFWriter(str(folder / "m.gguf"), arch)
    add_vocabulary(writer)
    add_tensor(writer, "token_embd.weight", np.zeros((400, 64), np.float32), None)
    return writer


def test_an_unknown_architecture_is_refused_with_the_list(tmp_path):
    finish(bare(tmp_path, arch="mamba"))
    assert_refused(tmp_path, "mamba.*llama, qwen2, qwen3, gemma")


def test_a_mixture_of_experts_is_refused(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=lambda writer: writer.add_expert_count(8))
    assert_refused(tmp_path, "mixture of experts")


def test_one_part_of_a_split_file_is_refused(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=lambda writer: writer.add_uint16("split.count", 3))
    assert_refused(tmp_path, "one of 3 parts.*--merge")


def test_a_tensor_of_the_wrong_shape_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0]["llama.feed_forward_length"] = gguf.gguf_writer.GGUFValue(128, gguf.GGUFValueType.UINT32)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, r"ffn_\w+.weight.*expected \(128, 64\)|ffn_down.*expected \(64, 128\)")


def test_a_tensor_no_such_model_has_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.add_tensor("blk.0.ssm_conv1d.weight", np.zeros((4, 64), np.float32))

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "ssm_conv1d")


def test_a_count_of_layers_that_is_not_there_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0]["llama.block_count"] = gguf.gguf_writer.GGUFValue(2_000_000_000, gguf.GGUFValueType.UINT32)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "2000000000")


def test_rotary_divisors_of_another_kind_are_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8).astype(np.float32))

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "rope_freqs")


@pytest.fixture
def sound(tmp_path, tiny_model):
    """The bytes of a sound file, and where its tensors begin."""
    write_gguf(tmp_path / "m.gguf", tiny_model)
    data = (tmp_path / "m.gguf").read_bytes()
    return data, min(tensor.start for tensor in read_header(tmp_path / "m.gguf").tensors)


@pytest.mark.parametrize(
    ("at", "patch", "complaint"),
    [
        (0, b"GGML", "letters GGUF"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 60), "items are announced"),
        (16, struct.pack("<Q", 1 << 60), "items are announced"),
        (24, struct.pack("<Q", 1 << 63), "bytes are announced"),
    ],
)
def test_a_damaged_head_is_refused(at, patch, complaint, sound, tmp_path):
    data = bytearray(sound[0])
    data[at : at + len(patch)] = patch
    (tmp_path / "m.gguf").write_bytes(data)
    assert_refused(tmp_path, complaint)


def test_a_file_cut_anywhere_is_refused(sound, tmp_path):
    data, tensors_at = sound
    for length in [*range(0, tensors_at, max(1, tensors_at // 60)), tensors_at + 1, len(data) - 64]:
        (tmp_path / "m.gguf").write_bytes(data[:length])
        assert_refused(tmp_path, "GGUF")


def test_a_flipped_byte_never_does_worse_than_a_refusal(sound, tmp_path):
    data, tensors_at = sound
    rng = random.Random(0)
    for trial in range(400):
        flipped = bytearray(data)
        flipped[rng.randrange(tensors_at)] ^= 1 << rng.randrange(8)
        (tmp_path / "m.gguf").write_bytes(flipped)
        try:
            convert_gguf(tmp_path / "m.gguf", tmp_path / f"out{trial}")
        except ConfigError:
            assert not (tmp_path / f"out{trial}").exists()


@pytest.mark.parametrize(
    ("error", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError("disk full"), FetchError)]
)
def test_a_conversion_that_fails_half_way_leaves_nothing(error, seen, tmp_path, tiny_model):
    class Failing:
        def start(self, label, total):
            pass

        def advance(self, amount):
            raise error

        def done(self):
            pass

    write_gguf(tmp_path / "m.gguf", tiny_model)
    with pytest.raises(seen):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", Failing())
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


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
