"""Attention of few rows, operands straight to the tensor cores: values, masks, splits and bits.

Only on a CUDA device: Triton's interpreter does not run Gluon. `chunk` is set throughout: without it sequences are
split alike in every batch, by the other kernel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_packed_rows import PAGE, ragged, random

from outrider.kernels import attention
from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, uniform_rows

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SHAPES = [(9, 3, 64), (14, 2, 64), (4, 4, 64), (12, 2, 128)]
WIDTHS = [[8], [3, 8, 0, 1], [16, 5], [1] * 20]


class Case:
    """Random queries, keys and values for a batch whose rows are packed."""

    def __init__(self, shape: tuple[int, int, int], widths: list[int], text: int, *, tree: bool = True) -> None:
        heads, kv, dim = shape
        self.batch, _, count = ragged(widths, text, tree=tree, splits=8)
        self.batch = replace(self.batch, chunk=64)
        self.rows = sum(widths)
        self.cache = [random(count * PAGE, kv, dim, seed=s) for s in (1, 2)]
        self.q = random(len(self.batch.packing.row_index), heads, dim, seed=3)
        self.work = AttentionWorkspace(8 * len(self.q), heads, dim, DEVICE)

    def attend(self, batch: AttentionBatch | None = None, q: torch.Tensor | None = None, **seen) -> torch.Tensor:
        from outrider.kernels.triton_attention import attend_pages, direct_splits

        batch, q = batch or self.batch, self.q if q is None else q
        assert direct_splits(q, self.cache[0], batch, PAGE) > 0
        out = torch.full_like(q, torch.nan)
        attend_pages(q, *self.cache, batch, out, self.work, scale=q.shape[2] ** -0.5, **seen)
        return out

    def judge(self, **seen) -> torch.Tensor:
        out = torch.empty_like(self.q, dtype=torch.float64)
        wide = (t.double() for t in (self.q, *self.cache))
        attention.attend_pages(*wide, self.batch, out, scale=self.q.shape[2] ** -0.5, **seen)
        return out[: self.rows]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("text", [1, 70, 300, 700, 5000])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_plain_ones_and_padding_is_not_written(shape, widths, text):
    case = Case(shape, widths, text)
    out = case.attend()
    assert distance(out[: case.rows], case.judge()) < 6e-3
    assert out[case.rows :].isnan().all()
    assert torch.equal(case.attend()[: case.rows], out[: case.rows])  # with counters as the first left them
    assert not case.work.counters.any()


@pytest.mark.parametrize("text", [70, 300, 2000])
@pytest.mark.parametrize(
    "seen",
    [{"softcap": 5.0}, {"window": 40}, {"window": 600}, {"skip": 1}, {"softcap": 5.0, "window": 90, "skip": 2}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128)], ids=str)
def test_soft_caps_windows_and_skipped_positions(shape, seen, text):
    case = Case(shape, [3, 8, 0, 1], text)
    assert distance(case.attend(**seen)[: case.rows], case.judge(**seen)) < 6e-3


@pytest.mark.parametrize("text", [70, 300, 2000])
def test_a_sequence_has_the_same_bits_alone(text):
    """Where both are split alike."""
    from outrider.kernels.triton_attention import direct_splits

    case = Case((9, 3, 64), [3, 8, 5, 1], text)
    splits = direct_splits(case.q, case.cache[0], case.batch, PAGE)
    batch, width, first = replace(case.batch, splits=splits), case.batch.width, 0
    together = case.attend(batch)
    for b, own in enumerate(batch.widths.tolist()):
        places = slice(b * width, (b + 1) * width)
        alone = replace(
            batch,
            **{name: getattr(batch, name)[b : b + 1] for name in ("table_ids", "starts", "widths")},
            ancestors=batch.ancestors[places],
            depths=batch.depths[places],
            packing=uniform_rows(1, width, DEVICE),
        )
        q = torch.zeros(width, 9, 64, dtype=case.q.dtype, device=DEVICE)
        q[:own] = case.q[first : first + own]
        assert torch.equal(case.attend(alone, q)[:own], together[first : first + own])
        first += own


@pytest.mark.parametrize("text", [20, 300, 2000])
def test_a_broken_node_reaches_no_row_that_does_not_see_it(text):
    case = Case((9, 3, 64), [3], text)
    start = int(case.batch.starts[0])
    tree = replace(
        case.batch,
        ancestors=torch.tensor([1, 3, 5], device=DEVICE),
        depths=torch.tensor([0, 1, 1], device=DEVICE),
    )
    page = int(tree.block_tables[tree.table_ids[0], (start + 1) // PAGE])
    for cache in case.cache:
        cache[page * PAGE + (start + 1) % PAGE] = torch.nan
    out = case.attend(tree)
    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()
