"""A model is known by its weights: in every format, under every name, and only by its own."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import random_model, write_gguf

from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError
from outrider.models.identity import ModelIdentity, has_shape, identify


@pytest.fixture
def model():
    """Stored in bfloat16, as most are: what a GGUF file holds of it in float32 is the same numbers."""
    return random_model("llama").bfloat16()


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def changed(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_formats_and_names_do_not_matter(model, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    found = identify(saved(model, tmp_path / "bf16"))
    assert found == identify(saved(model.float(), tmp_path / "other-name"))
    write_gguf(tmp_path / "q4.gguf", model.float(), kind=gguf.GGMLQuantizationType.Q4_0)
    assert found == identify(resolve(str(tmp_path / "q4.gguf")))
    config = model.config
    assert (found.vocab_size, found.hidden_size, found.layers) == (config.vocab_size, 64, 2)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.post_attention_layernorm.weight"])
def test_one_number_of_a_norm_makes_another_model(model, tmp_path, name):
    folder = saved(model, tmp_path)
    before = identify(folder)

    def nudge(weight):
        weight = weight.clone()
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0, dtype=weight.dtype))
        return weight

    changed(folder, name, nudge)
    assert identify(folder).norms != before.norms
    assert has_shape(folder, before)


def test_shapes_are_compared_without_weights(model, tmp_path):
    folder = saved(model, tmp_path)
    found = identify(folder)
    (folder / "model.safetensors").unlink()
    assert has_shape(folder, found)
    assert not has_shape(folder, ModelIdentity(found.vocab_size, found.hidden_size, 3, found.norms))
    assert ModelIdentity(**json.loads(json.dumps(found.as_json()))) == found


def test_what_is_no_sound_model_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        identify(tmp_path)
    folder = saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.input_layernorm"):
        identify(folder)
