"""The attention reference against a float64 softmax, and its bits against company and padding."""

import math

import pytest
import torch

from outrider.kernels.attention import attend_block, attend_rows

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
def test_a_row_has_the_same_bits_in_any_company(heads, kv, dim):
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
