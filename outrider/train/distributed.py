"""Training by several processes, one for each device, as `accelerate launch` starts them.

Every process holds the head and the optimizer. Each runs some of a step's passes, over rows that it alone has read; the
gradients are summed, and all take the same step. Only the first evaluates held-out answers, writes files and reports.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one run; by default this one alone."""

    rank: int = 0
    """The number of this process."""
    count: int = 1
    local: int = 0
    """The number of this process on its machine, which is the number of its GPU."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def passes(self, count: int) -> range:
        """The passes of a step that this process runs, of `count` in all."""
        return range(self.rank, count, self.count)

    def device(self, name: str) -> str:
        """The device of this process, where `name` leaves that open."""
        return f"cuda:{self.local}" if self.count > 1 and name in ("", "auto", "cuda") else name

    def add_up(self, tensors: Seq[Tensor]) -> None:
        """Replace each tensor, float32 and on one device, by the sum of those of all processes."""
        if self.count == 1:
            return
        whole = torch.cat([each.flatten() for each in tensors])
        dist.all_reduce(whole)
        for each, summed in zip(tensors, whole.split([each.numel() for each in tensors]), strict=True):
            each.copy_(summed.view(each.shape))

    def agreed(self, value: float, device: torch.device) -> float:
        """The first process's value."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return float(shared)

    def leave(self) -> None:
        """Disconnect from the other processes."""
        if self.count > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def join_ranks(device: str) -> Ranks:
    """Connect this process to the others that a launcher started. ConfigError where accelerate is missing.

    device: as a user names it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ConfigError(
            "training by several processes needs accelerate; install it with: pip install 'outrider[train]'"
        ) from error
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    return Ranks(state.process_index, state.num_processes, state.local_process_index)
