"""A row's attention has the same bits alone and among others, over many rows: what `pinned` rests on."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
HEADS, KV, DIM, PAGE = (4, 2, 16, 16) if INTERPRETED else (32, 8, 128, 16)
TEXT, TRIALS = (70, 2) if INTERPRETED else (700, 200)


def attend(q, cache, first: int, width: int, rows_per_program: int, splits: int):
    """Rows first to first + width of a text as one chain: all before them is cached."""
    from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, uniform_rows
    from outrider.kernels.triton_attention import attend_pages

    def ints(values):
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    block_tables = torch.arange(len(cache[0]) // PAGE, dtype=torch.int32, device=DEVICE)[None]
    chain = [(2 << w) - 1 for w in range(width)]
    where = (ints([0]), ints([first]), ints([width]), ints(chain), ints([*range(width)]))
    rows = uniform_rows(1, width, torch.device(DEVICE))
    batch = AttentionBatch(block_tables, *where, rows, splits, rows_per_program)
    out = torch.full((width, HEADS, DIM), torch.nan, dtype=HALF, device=DEVICE)
    work = AttentionWorkspace(width * splits, HEADS, DIM, torch.device(DEVICE))
    attend_pages(q, *cache, batch, out, work, scale=DIM**-0.5, page=PAGE, pdl=not INTERPRETED)
    return out


@pytest.mark.parametrize("width", [2, 6] if INTERPRETED else [2, 6, 8, 12, 16, 32])
def test_a_row_has_the_bits_it_has_alone(width):
    splits, differ = 4, 0
    for seed in range(TRIALS):
        g = torch.Generator(DEVICE).manual_seed(seed)
        slots = -(-(TEXT + 32) // PAGE) * PAGE
        cache = [torch.randn(slots, KV, DIM, generator=g, device=DEVICE).to(HALF) for _ in range(2)]
        q = (2 * torch.randn(width, HEADS, DIM, generator=g, device=DEVICE)).to(HALF)
        first = TEXT - seed
        rows_per_program = attend(q, cache, first, width, 8, splits)
        for row in {0, width // 2, width - 1}:
            alone = attend(q[row : row + 1].contiguous(), cache, first + row, 1, 8, splits)
            differ += int((alone[0] != rows_per_program[row]).sum())
    assert differ == 0
