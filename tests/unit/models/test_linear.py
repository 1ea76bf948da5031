"""Packed products against float64, and quantisers against what they must recover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.linear import QUANTIZED_ROWS, Int4Linear, Int8Linear, quantize_int4, quantize_int8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unpacked_int4(weight: Tensor) -> Tensor:
    """The weights as the product sees them, by the formula, in float64."""
    levels, scales = quantize_int4(weight)
    scale, zero = scales.double().repeat_interleave(32, 0).permute(2, 1, 0)
    return (levels - 8) * scale + zero


def test_a_q4_1_block_gets_its_own_levels_back():
    generator = torch.Generator().manual_seed(4)
    levels = torch.randint(0, 16, (64, 6, 32), generator=generator)
    levels[..., 3], levels[..., 17] = 0, 15  # as its quantiser leaves every block
    d = torch.rand(64, 6, 1, generator=generator).mul(0.02).add(0.001).half().float()
    m = (-d * torch.rand(64, 6, 1, generator=generator) * 15).half().float()
    found, scales = quantize_int4((d * levels + m).view(64, 192))
    assert torch.equal(found.view(64, 6, 32), levels.int())
    torch.testing.assert_close(scales[..., 0], d.squeeze(-1).T.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(scales[..., 1].float(), (m + 8 * d).squeeze(-1).T, rtol=2**-8, atol=1e-8)


def test_int4_misses_no_weight_by_more_than_half_a_step():
    weight = randn(32, 96)
    groups = weight.view(32, 3, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (unpacked_int4(weight) - weight).abs().view(32, 3, 32).amax(-1)
    assert (error <= step * (0.5 + 16 * 2**-8)).all()  # half a step, and bf16's share of scale and zero


def test_int8_misses_no_weight_by_more_than_half_a_step():
    weight = randn(QUANTIZED_ROWS + 32, 32) * torch.logspace(-6, 3, QUANTIZED_ROWS + 32).unsqueeze(1)
    levels, scales = quantize_int8(weight)
    error = (levels * scales.double().unsqueeze(1) - weight).abs().amax(1)
    assert (error <= scales * (0.5 + 127 * 2**-8)).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (16, 64), (97, 96), (1, 32), (50, 33), (7, 5), (33, 100)])
@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
def test_any_shape_multiplies_as_its_weights_say(kind: Any, outputs: int, inputs: int, bias: bool):
    """Widths the operators cannot take (int8 reads out of bounds, int4 refuses) are padded."""
    weight, added = randn(outputs, inputs), randn(outputs, seed=1) if bias else None
    padded = torch.nn.functional.pad(weight, (0, -inputs % 32))
    if kind is Int4Linear:
        exact = unpacked_int4(padded)[:, :inputs]
    else:
        levels, scales = quantize_int8(padded)
        exact = (levels * scales.double().unsqueeze(1))[:, :inputs]
    for rows in (1, 2, 5, 40):
        x = randn(rows, inputs, seed=2).bfloat16()
        expected = x.double() @ exact.T
        y = kind(weight, added)(x.float())
        assert y.dtype is torch.bfloat16
        error = (y.double() - (expected if added is None else expected + added.double())).abs()
        assert (error <= 2**-7 * (expected.abs() + 0.1 * expected.abs().max() + (0 if added is None else 4))).all()


def test_groups_without_spread_keep_their_value():
    weight = torch.full((16, 64), 0.375)
    weight[3] = 0
    assert torch.equal(unpacked_int4(weight).float(), weight)
    levels, scales = quantize_int8(torch.zeros(4, 32))
    assert not levels.any()
    assert not scales.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
def test_weights_that_are_no_numbers_are_refused(kind: Any, bad: float):
    weight = randn(16, 64)
    weight[5, 40] = bad
    with pytest.raises(ConfigError, match="cannot be packed"):
        kind(weight)
