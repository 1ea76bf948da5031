"""Rotary positions against the formulas Transformers runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.models.config import DecoderConfig
from outrider.models.families import parse_config
from outrider.models.rope import INITIAL_LENGTH, RopeTables, apply_rope, inverse_frequencies, pair_rows

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 131_072,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
    LLAMA3 | {"rope_theta": 500_000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 24, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "truncate": False, "attention_factor": 0.7},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5, "original_max_position_embeddings": 100},
]


def config(rope: dict[str, Any]) -> DecoderConfig:
    found = parse_config(BASE | {"rope_parameters": rope})
    assert found is not None
    return found


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: f"{rope['rope_type']}-{rope['factor']:g}")
def test_frequencies_are_those_of_transformers_to_the_bit(rope: dict[str, Any]):
    theirs, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        LlamaConfig(**{key: value for key, value in BASE.items() if key != "model_type"}, rope_parameters=dict(rope))
    )
    ours = config(rope).ropes[0]
    torch.testing.assert_close(inverse_frequencies(ours, 128), theirs, rtol=0, atol=0)
    assert ours.amplitude == pytest.approx(amplitude)


def test_growing_keeps_every_rotation():
    rotations = RopeTables(config({"rope_type": "default"}), torch.device("cpu"))
    positions = torch.tensor([0, 1, INITIAL_LENGTH - 1])
    (before,) = rotations(positions)
    (far,) = rotations(torch.tensor([5 * INITIAL_LENGTH]))
    assert rotations.length > 5 * INITIAL_LENGTH
    assert torch.equal(rotations(positions)[0], before)
    expected = 5 * INITIAL_LENGTH * inverse_frequencies(config({}).ropes[0], 128)
    torch.testing.assert_close(far[0, 0].angle().cos(), expected.cos(), rtol=0, atol=1e-5)


def test_tables_grown_while_serving_still_train():
    rotations = RopeTables(config({"rope_type": "default"}), torch.device("cpu"))
    with torch.inference_mode():
        rotations.reserve(2 * INITIAL_LENGTH)
    heads = torch.ones(1, 1, 128, requires_grad=True)
    apply_rope(heads, rotations(torch.tensor([INITIAL_LENGTH]))[0]).square().sum().backward()
    assert heads.grad is not None
    torch.testing.assert_close(heads.grad, 2 * torch.ones(1, 1, 128))  # a rotation keeps lengths


def test_pairs_turn_as_halves_do():
    """The reordered rotation is the textbook one (rotate_half), reordered."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 3, 8, generator=generator)
    angles = torch.randn(5, 1, 4, generator=generator)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    textbook = heads * cos + torch.cat((-heads[..., 4:], heads[..., :4]), -1) * sin
    turned = apply_rope(
        pair_rows(heads.permute(2, 0, 1), 8).permute(1, 2, 0).contiguous(), torch.polar(torch.ones(()), angles)
    )
    torch.testing.assert_close(turned, pair_rows(textbook.permute(2, 0, 1), 8).permute(1, 2, 0))
