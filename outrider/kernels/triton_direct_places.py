"""Where the cached keys and values of a program lie, and which thread loads what: for triton_direct_attention.py.

Keys are the right operand of the first product: a thread has 8 adjacent numbers of a key, 16 bytes, since any order of
dimensions will do if queries have the same. Values are the right operand of the second product, whose instructions read
pairs of keys: a thread has 8 adjacent numbers of the values of two keys each, and the result's dimensions are permuted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEY_LANES = gl.constexpr([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]])
VALUE_LANES = gl.constexpr([[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]])


@gluon.constexpr_function
def product_layout(warps):
    """[warps, rows, keys or dimensions]: each warp has keys of its own."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _bases(first, count, dim, rank):
    """Powers of two from `first` to below `count`, as steps along one of `rank` dimensions."""
    powers = [1 << i for i in range(count.bit_length() - 1) if 1 << i >= first]
    return [[power if i == dim else 0 for i in range(rank)] for power in powers]


@gluon.constexpr_function
def _value_layout(warps, keys, dim):
    """[warps, keys, dim // 8, 8]: a thread's 8 adjacent numbers of a value, for the keys of a right operand."""
    registers = [*_bases(1, 8, 3, 4), [0, 1, 0, 0], *_bases(8, keys, 1, 4), *_bases(8, dim // 8, 2, 4)]
    lanes = [[0, 2, 0, 0], [0, 4, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _bases(1, warps, 0, 4), [], [warps, keys, dim // 8, 8])


@gluon.constexpr_function
def _page_layout(warps, pages, page, lanes):
    """[warps, pages, page]: each thread has all pages of its warp, so that it loads a page's number once."""
    registers = [base for base in _bases(1, page, 2, 3) if base not in lanes] + _bases(1, pages, 1, 3)
    return gl.DistributedLinearLayout(registers, lanes, _bases(1, warps, 0, 3), [], [warps, pages, page])


@gluon.jit
def _slots(table, first, end, W: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr, LANES: gl.constexpr):
    """int64 [W, KEYS]: the slots of the positions from `first` on."""
    LAYOUT: gl.constexpr = _page_layout(W, KEYS // PAGE, PAGE, LANES)
    PAGES: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, PAGES))[:, None]
    p = first // PAGE + warp * (KEYS // PAGE) + gl.arange(0, KEYS // PAGE, layout=gl.SliceLayout(0, PAGES))[None, :]
    page = gl.load(table + p, mask=p * PAGE < end, other=0)[:, :, None].to(gl.int64)
    place = gl.arange(0, PAGE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.reshape(page * PAGE + place, (W, KEYS))


@gluon.jit
def key_places(keys, table, first, end, g, W: gl.constexpr, KEYS: gl.constexpr, KV: gl.constexpr, DIM: gl.constexpr,
                PAGE: gl.constexpr):  # fmt: skip
    """Pointers [W, DIM, KEYS] to the keys from position `first` on, and those positions."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, product_layout(W), 8)
    slot = _slots(table, first, end, W, KEYS, PAGE, KEY_LANES)
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None, :]
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    i = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return keys + (slot * KV + g) * DIM + d, first + warp * KEYS + i


@gluon.jit
def value_places(values, table, first, end, g, W: gl.constexpr, KEYS: gl.constexpr, KV: gl.constexpr,
                  DIM: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Pointers [W, KEYS, DIM // 8, 8] to the values from position `first` on, and those positions."""
    LAYOUT: gl.constexpr = _value_layout(W, KEYS, DIM)
    EIGHTS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    KEY: gl.constexpr = gl.SliceLayout(2, EIGHTS)
    slot = gl.convert_layout(_slots(table, first, end, W, KEYS, PAGE, VALUE_LANES), KEY, assert_trivial=True)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, KEY))[:, None]
    p = first + warp * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, KEY))[None, :]
    eight = gl.arange(0, DIM // 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, EIGHTS)))[None, None, :, None]
    d = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]
    return values + (slot[:, :, None, None] * KV + g) * DIM + eight * 8 + d, p[:, :, None, None]


@gluon.jit
def _ask_for(pointers):
    """Prefetch lines of memory into the L2 cache while this program computes."""
    ask: gl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(ask, "=r,l", [pointers.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def ask_for_block(keys, values, table, first, start, g, W: gl.constexpr, KEYS: gl.constexpr, KV: gl.constexpr,
                   DIM: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Prefetch one block of cached keys and values, from position `first` on, into the L2 cache."""
    p = first + gl.arange(0, W * KEYS, layout=gl.BlockedLayout([1], [32], [W], [0]))
    page = gl.load(table + p // PAGE, mask=p < start, other=0).to(gl.int64)
    at = ((page * PAGE + p % PAGE) * KV + g) * DIM
    for line in gl.static_range(DIM // 64):
        _ask_for(keys + at + line * 64)
        _ask_for(values + at + line * 64)
