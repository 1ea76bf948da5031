"""The decoder against Transformers: every family, read at once, token by token, and in bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, DenseAttend, save

from outrider.models.decoder import Decoder, Norm
from outrider.models.load import load_decoder

TOKENS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5))
BITES = {"at once": [24], "token by token": [10] + [1] * 14, "several tokens after a prefix": [10, 5, 3, 6]}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(request.param, folder)
    return load_decoder(folder, device="cpu"), model


def run(decoder: Decoder, bites: list[int], first: int = 0) -> torch.Tensor:
    """Logits [24, vocab] of TOKENS, read in bites of the given widths from position `first`."""
    attend, rows, start = DenseAttend(decoder.config), [], 0
    for width in bites:
        at = torch.arange(start, start + width)
        rows.append(decoder.logits(decoder.forward(TOKENS[at], at + first, attend)))
        start += width
    return torch.cat(rows)


@torch.inference_mode()
@pytest.mark.parametrize("bites", BITES.values(), ids=BITES)
def test_logits_are_those_of_transformers(pair: tuple[Decoder, Any], bites: list[int]):
    decoder, model = pair
    theirs = model(TOKENS[None]).logits[0]
    ours = run(decoder, bites)
    assert theirs.std() > 0.3  # or closeness would say nothing
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@torch.inference_mode()
def test_positions_far_beyond_the_trained_ones(pair: tuple[Decoder, Any]):
    decoder, model = pair
    first = 4000  # the tiny models were "trained" on 16 or 64
    theirs = model(TOKENS[None], position_ids=torch.arange(first, first + 24)[None]).logits[0]
    torch.testing.assert_close(run(decoder, [10, 1, 13], first), theirs, rtol=1e-5, atol=5e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path: Path, dtype: torch.dtype):
    save("qwen3", tmp_path)
    exact = run(load_decoder(tmp_path, device="cpu"), [24])
    decoder = load_decoder(tmp_path, device="cpu", dtype=dtype)
    rough = run(decoder, [24])
    assert decoder.dtype is dtype
    assert rough.dtype is torch.float32
    assert (rough - exact).norm() / exact.norm() < (0.03 if dtype is torch.bfloat16 else 0.004)


@torch.inference_mode()
@pytest.mark.parametrize(("quantize", "error"), [("int4", 0.25), ("int8", 0.05)])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma2"])
def test_packed_weights_stay_near_float_ones(tmp_path: Path, name: str, quantize: Any, error: float):
    save(name, tmp_path)
    exact = run(load_decoder(tmp_path, device="cpu"), [24])
    decoder = load_decoder(tmp_path, device="cpu", quantize=quantize)
    packed = run(decoder, [24])
    assert packed.dtype is decoder.dtype is torch.float32
    assert (packed - exact).norm() / exact.norm() < error


def test_gradients_flow_in_float_mode(tmp_path: Path):
    save("qwen3", tmp_path)
    decoder = load_decoder(tmp_path, device="cpu")
    weight: torch.Tensor = decoder.weights.layers[0].qkv.weight  # pyright: ignore[reportFunctionMemberAccess]
    weight.requires_grad_()

    def loss(scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(scale)
        return decoder.logits(decoder.forward(TOKENS, torch.arange(24), DenseAttend(decoder.config))).square().mean()

    here = loss()
    (slope,) = torch.autograd.grad(here, weight)
    step = 1e-3
    measured = (loss(1 + step) - here) / step
    torch.testing.assert_close(measured, (slope * weight / (1 + step)).sum(), rtol=0.02, atol=1e-4)


def test_norm_is_the_textbook_one():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, 20, generator=generator), torch.randn(3, 20, generator=generator)
    x64 = x.double()
    textbook = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(Norm(weight, 1e-3)(x), textbook.float(), rtol=1e-6, atol=1e-6)
    assert not Norm(weight, 1e-3)(torch.zeros_like(x)).any()
