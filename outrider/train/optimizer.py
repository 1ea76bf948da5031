"""The optimizer: Muon for matrices, AdamW for everything else. A step waits for nothing, so that it can be captured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration that brings singular values near 1
ITERATIONS = 5
EPS = 1e-8
MAX_ASPECT = 16  # a matrix that is longer is a table


class Muon(torch.optim.Optimizer):
    """Matrices move by their momentum with all singular values brought near 1, other parameters by AdamW.

    A matrix's update is scaled to the size of AdamW's, so that one rate serves both. The rate is a tensor on the
    device: `set_rate`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        betas: tuple[float, float],
        momentum: float,
        weight_decay: float,
        matrices: bool = True,
    ) -> None:
        tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
        own = [each for each in module.parameters() if each.requires_grad]
        chosen = [each for each in own if matrices and id(each) not in tables and is_matrix(each)]
        names = {id(each) for each in chosen}
        rest = [each for each in own if id(each) not in names]
        groups: list[dict[str, Any]] = [
            {"params": part, "matrices": flag} for part, flag in ((chosen, True), (rest, False)) if part
        ]
        super().__init__(groups, {"betas": betas, "momentum": momentum, "weight_decay": weight_decay})
        self.rate = torch.zeros((), device=own[0].device)

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            moved = [(each, each.grad) for each in group["params"] if each.grad is not None]
            for each, _ in moved if group["weight_decay"] else ():
                each.mul_(1 - self.rate * group["weight_decay"])
            move = self._move_matrices if group["matrices"] else self._move_others
            move(moved, group)

    def _move_matrices(self, moved: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        """Matrices of one shape, or its transpose, go through the iteration together."""
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for each, gradient in moved:
            moving = self._own(each, "momentum")
            moving.lerp_(gradient, 1 - group["momentum"])
            ahead = torch.lerp(gradient, moving, group["momentum"])  # Nesterov's
            wide = ahead if each.shape[0] <= each.shape[1] else ahead.T
            by_shape.setdefault(tuple(wide.shape), []).append((each, wide))
        for members in by_shape.values():
            updates = orthogonalized(torch.stack([wide for _, wide in members]))
            for (each, _), update in zip(members, updates, strict=True):
                size = 0.2 * math.sqrt(max(each.shape))  # an update's root mean square is then about AdamW's
                each.sub_((update if update.shape == each.shape else update.T) * (self.rate * size))

    def _move_others(self, moved: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        for each, gradient in moved:
            mean, square, count = (self._own(each, name) for name in ("mean", "square", "count"))
            count.add_(1)
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            scale = (square / (1 - second**count)).sqrt_().add_(EPS)
            each.sub_(mean / (1 - first**count) / scale * self.rate)

    def _own(self, each: Tensor, name: str) -> Tensor:
        """A parameter's moment: zeros at first."""
        state = self.state[each]
        if name not in state:
            state[name] = torch.zeros((), device=each.device) if name == "count" else torch.zeros_like(each)
        return state[name]


def is_matrix(each: Tensor) -> bool:
    """Whether a parameter is a matrix: no vector, and no table with a row for each token."""
    return each.dim() == 2 and max(each.shape) <= MAX_ASPECT * min(each.shape)


def orthogonalized(matrices: Tensor) -> Tensor:
    """[N, rows, columns], rows <= columns -> the same singular vectors, all singular values about 1; in bf16 on CUDA"""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.to(matrices.dtype)
