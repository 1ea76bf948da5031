"""A head's linear layers where the target's are packed: the time of a pass is then that of reading weights.

They have 8 bits and use the CPU kernels where these are available. Otherwise they are in bfloat16 where the CPU
multiplies it: a block has more rows than PyTorch's packed operators compute at a time, which makes these take 1.5 times
as long as bfloat16. Otherwise they have 8 bits and use PyTorch's packed operators.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.models.blocks import BlockLinear, int8_linear
from outrider.models.linear import Int8Linear, Linear, LinearOp
from outrider.native.library import library


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 without converting it."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedLinear(nn.Module):
    """A linear layer that returns rows of the dtype it is given. It cannot be trained or saved."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        kernels = library()
        self._dtype = torch.bfloat16 if kernels is None else torch.float32
        self._packed: LinearOp
        self.blocks: BlockLinear | None = None
        """Its weights, where the CPU kernels multiply them."""
        if kernels is not None:
            self._packed = self.blocks = int8_linear(kernels, weight, bias)
            return
        kind = Linear if multiplies_bfloat16() else Int8Linear
        self._packed = kind(weight.bfloat16(), None if bias is None else bias.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        return self._packed(x.to(self._dtype)).to(x.dtype)


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer inside a module, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
