import pytest
import torch

from outrider.verify.largest import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_of_the_largest(dtype):
    rows = torch.randn(5, 3001, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[1, [40, 2000]] = 100.0
    rows[2, 700] = torch.nan
    rows[3] = -torch.inf
    values, at = largest(rows)
    assert at.dtype == torch.int64
    assert at[1] == 40
    assert at[2] == 700
    assert at[3] == 0
    assert values[2].isnan()
    for i in (0, 1, 4):
        assert at[i] == next(k for k in range(3001) if rows[i, k] == rows[i].max())
        assert values[i] == rows[i].max()
    whole = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.testing.assert_close(largest(whole[:, ::2])[1], whole[:, ::2].max(-1).indices)
