"""The fused losses against the plain ones, and their gradient against autograd's. Runs interpreted without a GPU."""

import os

import pytest
import torch

from outrider.train.vocabulary import Losses, TargetLogits, plain_losses

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("columns", [64, 2048, 5000])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients(columns, both, dtype):
    from outrider.kernels.triton_losses import distance_losses

    generator = torch.Generator().manual_seed(columns + both)
    first, second, target = ((2 * torch.randn(6, columns, generator=generator)).to(DEVICE, dtype) for _ in range(3))
    totals = target.float().logsumexp(-1) + torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 0.0], device=DEVICE)
    weights = torch.rand(2, 6, generator=generator).to(DEVICE)
    made = []
    for run in (lambda *a: Losses(*distance_losses(*a)), lambda a, b, t, s: plain_losses(a, b, TargetLogits(t, s))):
        leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        found = run(leaves[0], leaves[1] if both else None, target, totals)
        (found.entropy * weights[0] + found.distance * weights[1]).sum().backward()
        made.append((found, [each.grad for each in leaves[: 1 + both]]))
    (fused, gradients), (plain, expected) = made
    for name in ("entropy", "distance", "mass"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
    assert float(plain.mass.min()) < 0.1, "one row has most of its mass outside"
