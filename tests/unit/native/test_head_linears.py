"""A head's linear layers by the CPU kernels: near the float ones, each row by itself."""

import pytest
import torch
from torch import nn

from outrider.models.heads.packed import PackedLinear
from outrider.native.library import library


@pytest.mark.parametrize(("columns", "outputs", "bias"), [(64, 96, False), (80, 48, True), (1728, 576, False)])
def test_rows_are_near_the_float_layers_and_do_not_depend_on_each_other(columns, outputs, bias):
    if library() is None:
        pytest.skip("no CPU kernels here")
    torch.manual_seed(columns)
    linear = nn.Linear(columns, outputs, bias=bias)
    rows = torch.randn(7, columns)
    with torch.no_grad():
        exact, packed = linear(rows), PackedLinear(linear)
        found = packed(rows)
        assert found.dtype == torch.float32
        assert (found - exact).norm() < 0.015 * exact.norm()
        for i in range(7):
            assert torch.equal(packed(rows[i : i + 1])[0], found[i])
        assert packed(rows.bfloat16()).dtype == torch.bfloat16
