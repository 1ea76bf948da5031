"""The Triton kernels against their plain references: fresh random inputs, poisoned outputs, float64 judges."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.attention import attend_block

pytestmark = pytest.mark.gpu
DEVICE = "cuda"

PRODUCTS = [  # outputs, inputs, gated, normed, added: an 8B model's, SmolLM2's, and one that fits no tile
    (6144, 4096, False, True, False),
    (4096, 4096, False, False, True),
    (14336, 4096, True, True, False),
    (4096, 14336, False, False, True),
    (960, 576, False, True, False),
    (1536, 576, True, True, False),
    (576, 1536, False, False, True),
    (130, 96, False, True, True),
]


def distance(out: torch.Tensor, judge: torch.Tensor) -> float:
    return float((out.double() - judge).norm() / judge.norm())


@pytest.mark.parametrize("rows", [1, 2, 6, 16])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_a_fused_product_is_the_plain_one(product, rows):
    from outrider.kernels.triton_linear import Scratch, linear, plain_linear

    n, k, gated, normed, added = product
    g = torch.Generator(DEVICE).manual_seed(n + rows)
    w = (torch.randn(n * (1 + gated), k, generator=g, device=DEVICE) * k**-0.5).bfloat16()
    x = torch.randn(rows, k, generator=g, device=DEVICE).bfloat16()
    residual = torch.randn(rows, n, generator=g, device=DEVICE).bfloat16() if added else None
    eps = 1e-5 if normed else None
    judge = plain_linear(
        x.double(), w.double(), residual=None if residual is None else residual.double(), eps=eps, gated=gated
    )
    scratch = Scratch(2 * n, torch.device(DEVICE))
    outs = []
    for one_path in (False, True, True):
        out = torch.full((rows, n), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        linear(x, w, out, scratch, residual=residual, eps=eps, gated=gated, one_path=one_path)
        assert distance(out, judge) < 5e-3
        outs.append(out)
    assert torch.equal(outs[1], outs[2])
    for row in range(rows):  # alone, a row has the bits it has among others
        alone = torch.empty(1, n, device=DEVICE, dtype=torch.bfloat16)
        own = None if residual is None else residual[row : row + 1].contiguous()
        linear(x[row : row + 1].contiguous(), w, alone, scratch, residual=own, eps=eps, gated=gated, one_path=True)
        assert torch.equal(alone[0], outs[1][row])


@pytest.mark.parametrize(
    ("sequences", "width", "text"), [(1, 1, 5), (1, 6, 511), (3, 6, 700), (2, 16, 1000), (1, 8, 4096)]
)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (5.0, 0), (0.0, 90)])
def test_paged_attention_is_the_plain_one(sequences, width, text, tree, softcap, window):
    from outrider.kernels.triton_attention import CHUNK, Batch, Workspace, attend_pages

    g = torch.Generator(DEVICE).manual_seed(text + width)
    heads, kv, dim, page = 8, 2, 64, 16
    pages = -(-(text + width) // page)
    count = sequences * pages + 3
    keys, values = (torch.randn(count * page, kv, dim, generator=g, device=DEVICE).bfloat16() for _ in range(2))
    tables = torch.randperm(count, generator=g, device=DEVICE)[: sequences * pages].view(sequences, pages)
    starts = torch.randint(max(1, text // 2), text + 1, (sequences,), generator=g, device=DEVICE)
    q = torch.randn(sequences * width, heads, dim, generator=g, device=DEVICE).bfloat16()
    choose = torch.Generator().manual_seed(width)
    ancestors, depths = [], []
    for _ in range(sequences):
        bits, depth = [1], [0]
        for w in range(1, width):
            parent = int(torch.randint(0, w, (), generator=choose)) if tree else w - 1
            bits.append(bits[parent] | 1 << w)
            depth.append(depth[parent] + 1)
        ancestors += bits
        depths += depth
    batch = Batch(
        tables,
        starts,
        torch.tensor(ancestors, device=DEVICE),
        torch.tensor(depths, device=DEVICE),
        width,
        -(-(text + width) // CHUNK),
    )
    work = Workspace(len(q), heads, dim, batch.chunks, torch.device(DEVICE))
    out = torch.full_like(q, torch.nan)
    attend_pages(q, keys, values, batch, out, work, scale=dim**-0.5, softcap=softcap, window=window)
    for b in range(sequences):
        start = int(starts[b])
        slots = (tables[b][:, None] * page + torch.arange(page, device=DEVICE)).flatten()[: start + width]
        rows = slice(b * width, (b + 1) * width)
        place = torch.arange(start + width, device=DEVICE)
        seen = (place < start) | ((batch.ancestors[rows, None] >> (place - start).clamp(min=0)) & 1 == 1)
        if window:
            seen &= (place >= start) | (place > start + batch.depths[rows, None] - window)
        mask = torch.zeros(seen.shape, device=DEVICE, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
        args = (t.double() for t in (q[rows], keys[slots], values[slots]))
        judge = attend_block(*args, mask, dim**-0.5, softcap)
        assert distance(out[rows], judge) < 1e-2


def test_a_broken_row_reaches_nobody_who_does_not_see_it():
    from outrider.kernels.triton_attention import Batch, Workspace, attend_pages

    keys, values = (torch.randn(64, 1, 64, device=DEVICE).bfloat16() for _ in range(2))
    keys[21:] = values[21:] = torch.nan
    q = torch.randn(2, 2, 64, device=DEVICE).bfloat16()
    tables = torch.tensor([[0, 1, 2, 3]], device=DEVICE)
    batch = Batch(
        tables, torch.tensor([20], device=DEVICE), torch.tensor([1, 3], device=DEVICE),
        torch.tensor([0, 1], device=DEVICE), 2, 1,
    )  # fmt: skip
    out = torch.empty_like(q)
    attend_pages(q, keys, values, batch, out, Workspace(2, 2, 64, 1, torch.device(DEVICE)), scale=0.125)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
