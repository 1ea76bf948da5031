"""Packed mode: a row's bits do not depend on the rows it shares a batch with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save
from torch import Tensor

from outrider.models.config import Activation, DecoderConfig
from outrider.models.decoder import ACTIVATION_FUNCTIONS, row_invariant
from outrider.models.linear import Int4Linear, Int8Linear
from outrider.models.load import load_decoder

WIDTHS = (1, 2, 3, 5, 7, 16, 33)


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class OwnKeys:
    """Every row attends to the same few fixed keys, one row at a time."""

    def __init__(self, config: DecoderConfig) -> None:
        generator = torch.Generator().manual_seed(1)
        self.scale = config.attention_scale
        self.keys, self.values = torch.randn(2, config.heads, 4, config.head_dim, generator=generator)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = k.mean(1, keepdim=True) + v.mean(1, keepdim=True)  # so that k and v matter too; [N, 1, dim]
        return torch.stack([self._row(q[i] + mixed[i]) for i in range(len(q))])

    def _row(self, q: Tensor) -> Tensor:
        weights = torch.einsum("hd,htd->ht", q, self.keys).mul(self.scale).softmax(-1)
        return torch.einsum("ht,htd->hd", weights, self.values).flatten()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "quantize", "changes"),
    [  # 1540 and 2730 are no multiple of any vector; 33 and 64 rows of them are shared out to threads
        ("llama", "int4", {"intermediate_size": 1540}),
        ("llama-biases", "int8", {"intermediate_size": 1540}),
        ("qwen2", "int8", {"intermediate_size": 2730}),
        ("qwen3", "int4", {"intermediate_size": 64}),
        ("gemma2", "int4", {"intermediate_size": 2730, "final_logit_softcapping": 20.0}),
        ("gemma3", "int4", {"intermediate_size": 100, "final_logit_softcapping": 20.0, "layer_types": None}),
    ],
)
def test_forward_and_logits(tmp_path: Path, threads: int, name: str, quantize: Any, changes: dict[str, Any]):
    save(name, tmp_path, spread=1.0, hidden_size=54, vocab_size=127, num_hidden_layers=2, **changes)
    decoder = load_decoder(tmp_path, device="cpu", quantize=quantize)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 127, (64,), generator=generator)
    positions = torch.randint(0, 3000, (64,), generator=generator)
    attend = OwnKeys(decoder.config)

    def run(first: int, last: int) -> Tensor:
        hidden = decoder.forward(ids[first:last], positions[first:last], attend)
        return torch.cat((hidden, decoder.logits(hidden)), 1)

    whole = run(0, 64)
    for width in WIDTHS:
        assert torch.equal(run(0, width), whole[:width]), f"bits move at {width} rows"
    for row in (1, 20, 33, 63):
        assert torch.equal(run(row, row + 1), whole[row : row + 1]), f"bits of row {row} move when it is alone"


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)  # three shares seldom end where a row does
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize("width", [100, 2730, 1599])
def test_activations(threads: int, activation: Activation, width: int):
    """In float32, where a last bit shows; the decoder's own run on bf16, where it seldom does."""
    gate_up = torch.randn(64, 2 * width, generator=torch.Generator().manual_seed(4)) * 3
    activate = row_invariant(ACTIVATION_FUNCTIONS[activation], activation, width)
    whole = activate(gate_up[:, :width])
    for row in range(64):
        assert torch.equal(activate(gate_up[row : row + 1, :width])[0], whole[row]), f"bits of row {row} move"


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (97, 100), (50, 1540)])
def test_products(threads: int, kind: Any, outputs: int, inputs: int):
    generator = torch.Generator().manual_seed(3)
    product = kind(torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator))
    x = torch.randn(200, inputs, generator=generator)
    whole = product(x)
    for width in (*WIDTHS, 64):
        assert torch.equal(product(x[:width]), whole[:width]), f"bits move at {width} rows"
        assert torch.equal(product(x[-width:]), whole[-width:]), f"bits move at {width} rows"
