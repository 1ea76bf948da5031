"""The kernel in Gluon, compiled for a GPU that need not be here: Triton's interpreter does not run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled then")

POINTERS = {"slots": "*i64", "cos_sin": "*fp32"}
NUMBERS = {"m": "i32", "residual_stride": "i32", "eps": "fp32"}
PRODUCTS = [  # outputs, inputs, normed, gated, added, heads: of SmolLM2
    (960, 576, True, False, False, (9, 3, 64)),
    (1536, 576, True, True, False, (0, 0, 0)),
    (576, 1536, False, False, True, (0, 0, 0)),
]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_operands_are_loaded_whole_and_warps_wait_once(product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it is for: no barrier but the one before the warps' sums are added, and loads of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from outrider.kernels.triton_direct_linear import direct_rows
    from outrider.kernels.triton_tiles import direct_tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    n, k, normed, gated, added, heads = product
    tile = direct_tile(n, k, gated, 8)
    assert tile is not None
    known = (n, k, normed, gated, added, True, *heads, tile.rows, tile.outputs, tile.inputs, tile.warps)
    names = direct_rows.arg_names
    constants = dict(zip(names[-len(known) :], known, strict=True))
    signature = {
        name: "constexpr" if name in constants else NUMBERS.get(name) or POINTERS.get(name, "*bf16") for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = GluonASTSource(
        direct_rows, signature, {(names.index(name),): value for name, value in constants.items()}, aligned
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    before, _, after = made.asm["ptx"].partition("griddepcontrol.wait")
    assert "bar.sync" not in before
    assert after.count("bar.sync") == 1
    assert before.count("ld.global.v4") >= tile.outputs * k * (1 + gated) // (256 * tile.warps)  # all weights
    assert after.count("mma.sync") >= tile.outputs // 16 * k // (16 * tile.warps)
