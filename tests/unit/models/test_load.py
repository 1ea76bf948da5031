"""Loading: what is read, and what is refused before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import DenseAttend, make, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.load import load_decoder

TOKENS = torch.tensor([5, 60, 12, 96, 0, 33])


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    hidden = decoder.forward(TOKENS, torch.arange(len(TOKENS)), DenseAttend(decoder.config))
    return decoder.logits(hidden)


def load(folder: Path, **options: Any) -> Decoder:
    return load_decoder(folder, device="cpu", **options)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path):
    model = save("qwen2", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "many")), logits(load(tmp_path / "one")))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_half_precision_is_computed_in_float32_on_the_cpu(tmp_path: Path, stored: torch.dtype):
    make("llama").to(stored).save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert decoder.dtype is torch.float32
    assert decoder.config.dtype is stored
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(decoder), theirs.detach(), rtol=1e-5, atol=2e-5)


def test_progress_counts_layers(tmp_path: Path):
    save("llama", tmp_path)
    told: list[Any] = []
    noting = SimpleNamespace(
        start=lambda label, total: told.append((label, total)), advance=told.append, done=lambda: told.append("done")
    )
    load(tmp_path, progress=noting)
    assert told == [("reading weights", 4), 1, 1, 1, 1, "done"]


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path):
    save("llama", tmp_path)
    plain = logits(load(tmp_path))
    change_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(load(tmp_path)), plain)


def test_a_head_stored_beside_tied_embeddings_is_the_one_used(tmp_path: Path):
    """Transformers 5 does the same: where both are stored and differ, they are not tied."""
    save("llama-tied", tmp_path)
    tied = logits(load(tmp_path))
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": table.clone()}))
    assert torch.equal(logits(load(tmp_path)), tied)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": -table}))
    assert torch.equal(logits(load(tmp_path)), -tied)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "model.layers.2.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra has no place in the model"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
            "model.layers.0.self_attn.q_proj.bias has no place",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(49)}),
            r"model.norm.weight has shape \(49,\), not \(48,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.float8_e4m3fn)}),
            "model.norm.weight is stored as torch.float8_e4m3fn",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str):
    save("llama", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


def test_a_long_list_of_faults_is_cut(tmp_path: Path):
    save("llama", tmp_path)
    change_tensors(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    with pytest.raises(ConfigError, match="and 4 more"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_a_model_that_is_not_ours_says_why(tmp_path: Path, changes: dict[str, Any], says: str):
    save("llama", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"llama"'])
def test_a_broken_config_is_refused(tmp_path: Path, text: str):
    save("llama", tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        load(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path):
    save("llama", tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="not a sound safetensors file"):
        load(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path):
    save("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lies beside the index"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda", "quantize": "int4"},
        {"device": "cpu", "quantize": "int8", "dtype": torch.bfloat16},
        {"device": "cpu", "dtype": torch.float64},
    ],
)
def test_options_that_do_not_go_together_are_refused_before_reading(tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"quantize|float64"):
        load_decoder(tmp_path / "nowhere", **options)
