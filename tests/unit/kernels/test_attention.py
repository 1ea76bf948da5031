"""The attention reference against a float64 softmax, its bits against company and padding, and its paged form."""

import math

import pytest
import torch

from outrider.kernels.accept import tree_rows
from outrider.kernels.attention import attend_block, attend_pages, attend_rows, locate_rows
from outrider.kernels.batch import AttentionBatch, PackedRows, RowPlaces, uniform_rows

FORMS = {"rows": attend_rows, "block": attend_block}


def judge(q, k, v, mask, scale, softcap):
    """[R, H, D] in float64, spelled out."""
    group = q.shape[1] // k.shape[-2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for r in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = (k if k.dim() == 3 else k[r])[:, h // group].double()
            values = (v if v.dim() == 3 else v[r])[:, h // group].double()
            scores = keys @ q[r, h].double() * scale
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            out[r, h] = (scores + mask[r].double()).softmax(-1) @ values
    return out


def limits_mask(limits, length):
    hidden = torch.arange(length) >= torch.tensor(limits)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("own_keys", [False, True])
def test_attention_is_the_softmax_it_says(form, softcap, own_keys):
    g = torch.Generator().manual_seed(1)
    rows, heads, kv, dim, length = 5, 6, 2, 16, 32
    q = torch.randn(rows, heads, dim, generator=g)
    shape = (rows, length, kv, dim) if own_keys else (length, kv, dim)
    k, v = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    mask = limits_mask([3, 9, 17, 20, 32], length)
    out = FORMS[form](q, k, v, mask, 0.3, softcap)
    torch.testing.assert_close(out.double(), judge(q, k, v, mask, 0.3, softcap), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (14, 2, 64)])
def test_a_row_has_the_same_bits_in_any_batch(heads, kv, dim):
    """One row alone, padded to its own page, against the same row among others, padded further."""
    g = torch.Generator().manual_seed(heads)
    k, v = torch.randn(1600, kv, dim, generator=g), torch.randn(1600, kv, dim, generator=g)
    for start in (1, 15, 16, 70, 255, 256, 511, 700, 1030, 1400):
        rows = 1 + start % 9
        q = torch.randn(rows, heads, dim, generator=g)
        limits = [start + r for r in range(rows)]
        for extra in (0, 1, 7):
            length = -(-limits[-1] // 16) * 16 + 16 * extra
            together = attend_rows(q, k[:length], v[:length], limits_mask(limits, length), dim**-0.5)
            for r, limit in enumerate(limits):
                own = -(-limit // 16) * 16
                alone = attend_rows(q[r : r + 1], k[:own], v[:own], limits_mask([limit], own), dim**-0.5)
                assert torch.equal(alone[0], together[r]), (start, r, extra)


def test_keys_gathered_for_a_tree_give_the_bits_of_keys_in_place():
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(320, 3, 64, generator=g), torch.randn(320, 3, 64, generator=g)
    q = torch.randn(4, 9, 64, generator=g)
    mask = limits_mask([250, 251, 251, 252], 256)
    shared = attend_rows(q, k[:256], v[:256], mask, 0.125)
    own = attend_rows(q, k[:256].expand(4, -1, -1, -1), v[:256].expand(4, -1, -1, -1).clone(), mask, 0.125)
    assert torch.equal(shared, own)


PAGE = 4


CPU = torch.device("cpu")


def packed_rows(widths: list[int], width: int, padding: int) -> PackedRows:
    """Real rows alone, one sequence after another, then rows of padding."""
    places = [b * width + w for b, own in enumerate(widths) for w in range(own)]
    offsets = [sum(widths[:b]) for b in range(len(widths))]
    return PackedRows(width, torch.tensor(offsets), torch.tensor(places + [-1] * padding))


def paged_batch(sequences: int, width: int, text: int, *, tree: bool, packed: bool) -> tuple[AttentionBatch, int]:
    """Random pages, lengths and drafts; sequences are up to four rows narrower than the pass. And how many slots."""
    g = torch.Generator().manual_seed(sequences + width + text)
    pages = -(-(text + width) // PAGE)
    count = 2 * sequences * pages
    block_tables = torch.randperm(count, generator=g)[: sequences * pages].view(sequences, pages).int()
    starts = torch.randint(0, text + 1, (sequences,), generator=g)
    widths = (torch.full((sequences,), width) - torch.arange(sequences) * 3 % 5).clamp(min=1)
    parents = torch.rand(sequences, width - 1, generator=g) * torch.arange(1, width) - 1 if tree else None
    chain = torch.arange(width - 1).repeat(sequences, 1) - 1
    ancestors, depths = tree_rows(chain if parents is None else parents.floor().long(), widths - 1)
    table_ids = torch.randperm(sequences, generator=g)
    rows = table_ids, starts, widths, ancestors.flatten(), depths.flatten()
    packing = packed_rows(widths.tolist(), width, 3) if packed else uniform_rows(sequences, width, CPU)
    return AttentionBatch(block_tables, *rows, packing, splits=1), count * PAGE


def slots_of(batch: AttentionBatch, b: int, end: int) -> list[int]:
    table = batch.block_tables[batch.table_ids[b]].tolist()
    return [table[p // PAGE] * PAGE + p % PAGE for p in range(end)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("softcap", "window", "skip"), [(0.0, 0, 0), (5.0, 0, 0), (0.0, 3, 0), (0.0, 0, 1), (0.0, 8, 2)]
)
@pytest.mark.parametrize(("sequences", "width", "text"), [(1, 1, 0), (4, 6, 21), (3, 32, 9)])
def test_paged_attention_is_that_of_the_keys_in_order(sequences, width, text, softcap, window, skip, tree, packed):
    batch, count = paged_batch(sequences, width, text, tree=tree, packed=packed)
    g = torch.Generator().manual_seed(1)
    keys, values = (torch.full((count, 2, 16), torch.nan) for _ in range(2))  # what nobody wrote is NaN
    ends = (batch.starts + batch.widths).tolist()
    for b, end in enumerate(ends):
        for cache in (keys, values):
            cache[slots_of(batch, b, end)] = torch.randn(end, 2, 16, generator=g)
    q = torch.randn(len(batch.packing.row_index), 6, 16, generator=g)
    q[batch.packing.row_index < 0] = torch.nan
    out = torch.full_like(q, torch.nan)
    attend_pages(q, keys, values, batch, out, scale=0.25, softcap=softcap, window=window, skip=skip, page=PAGE)
    first = 0
    for b, own in enumerate(batch.widths.tolist()):
        start, end, slots = int(batch.starts[b]), ends[b], slots_of(batch, b, ends[b])
        mask = torch.full((own, end), -torch.inf)
        for w in range(own):
            place = b * width + w
            for p in range(end):
                position = start + int(batch.depths[place])
                near = not window or p > position - window
                if p < skip and p != position:
                    continue
                if near if p < start else int(batch.ancestors[place]) >> (p - start) & 1:
                    mask[w, p] = 0
        expected = attend_block(q[first : first + own], keys[slots], values[slots], mask, 0.25, softcap)
        torch.testing.assert_close(out[first : first + own], expected, rtol=1e-5, atol=1e-5)
        first += own if packed else width


def test_a_broken_node_reaches_no_row_that_does_not_see_it():
    ancestors, depths = tree_rows(torch.tensor([[-1, -1]]), torch.tensor([2]))
    ints = torch.tensor([0]), torch.tensor([3]), torch.tensor([3]), ancestors[0], depths[0]
    batch = AttentionBatch(torch.tensor([[0, 1]], dtype=torch.int32), *ints, uniform_rows(1, 3, CPU), splits=1)
    keys, values, q = torch.randn(8, 1, 16), torch.randn(8, 1, 16), torch.randn(3, 2, 16)
    keys[4] = values[4] = torch.nan  # of the first node
    out = torch.empty_like(q)
    attend_pages(q, keys, values, batch, out, scale=0.25, page=PAGE)
    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_rows_are_located_by_the_block_tables(tree, packed):
    batch, count = paged_batch(4, 6, 21, tree=tree, packed=packed)
    cos_sin, used = torch.rand(64, 8, 2), len(batch.packing.row_index)
    places = RowPlaces.empty(used + 6, 16, CPU)
    places.slots.fill_(-1)
    locate_rows(batch, cos_sin, places.first(used), scratch_slot=count, page=PAGE)
    located, first = {}, 0
    for b, own in enumerate(batch.widths.tolist()):
        start = int(batch.starts[b])
        for w in range(own):
            located[first + w] = slots_of(batch, b, start + w + 1)[-1]
            assert torch.equal(places.cos_sin[first + w], cos_sin[start + int(batch.depths[b * 6 + w])])
        first += own if packed else 6
    assert places.slots.tolist() == [located.get(row, count) for row in range(used)] + [-1] * 6
