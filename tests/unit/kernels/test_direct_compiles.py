"""The kernels in Gluon, compiled for a GPU that need not be here: Triton's interpreter does not run them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled then")

INDEX, PART = "*i64", "*fp32"
TYPES = {  # of arguments that are not pointers to bfloat16
    "slots": INDEX, "table_ids": INDEX, "starts": INDEX, "widths": INDEX, "ancestors": INDEX, "depths": INDEX,
    "offsets": INDEX, "block_tables": "*i32", "counters": "*i32",
    "cos_sin": PART, "parts": PART, "peaks": PART, "sums": PART,
    "eps": "fp32", "scale": "fp32", "softcap": "fp32",
} | dict.fromkeys(
    ("m", "residual_stride", "window", "skip", "width", "pages", "groups", "rows_per_program", "splits", "chunk"), "i32"
)  # fmt: skip
PRODUCTS = [  # outputs, inputs, normed, gated, added, heads: of SmolLM2
    (960, 576, True, False, False, (9, 3, 64)),
    (1536, 576, True, True, False, (0, 0, 0)),
    (576, 1536, False, False, True, (0, 0, 0)),
]


def ptx_of(kernel, known: tuple[int, ...], warps: int) -> str:
    """PTX of a kernel whose last arguments are `known`, pointers aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    constants = dict(zip(names[-len(known) :], known, strict=True))
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*bf16") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = GluonASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_operands_are_loaded_whole_and_warps_wait_once(product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it is for: no barrier but the one before the warps' sums are added, and loads of 16 bytes."""
    from outrider.kernels.triton_direct_linear import direct_rows
    from outrider.kernels.triton_tiles import direct_tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    n, k, normed, gated, added, heads = product
    tile = direct_tile(n, k, gated, 8)
    assert tile is not None
    known = (n, k, normed, gated, added, True, *heads, tile.rows, tile.outputs, tile.inputs, tile.warps)
    before, _, after = ptx_of(direct_rows, known, tile.warps).partition("griddepcontrol.wait")
    assert "bar.sync" not in before
    assert after.count("bar.sync") == 1
    assert before.count("ld.global.v4") >= tile.outputs * k * (1 + gated) // (256 * tile.warps)  # all weights
    assert after.count("mma.sync") >= tile.outputs // 16 * k // (16 * tile.warps)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(9, 3, 64), (12, 2, 128)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_loads_keys_before_it_waits_and_warps_wait_once(heads, kv, dim, masked, tmp_path, monkeypatch):
    """Cached keys and values of a block in registers before the input is there; one barrier where nothing is split."""
    from outrider.kernels.triton_attention import DIRECT_WARPS
    from outrider.kernels.triton_direct_attention import attend_direct

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    known = (heads, kv, dim, 16, 2048 // dim, DIRECT_WARPS, masked, masked, True)
    before, _, after = ptx_of(attend_direct, known, DIRECT_WARPS).rpartition("griddepcontrol.wait")
    assert "bar.sync" not in before
    assert before.count("ld.global.v4") == 16  # 2048 numbers of keys, and as many of values, 8 at a time: 32 threads
    whole, stored, _ = after.partition("st.global")
    assert stored
    assert whole.count("bar.sync") == 1
