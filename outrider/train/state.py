"""The state of a training run on disk, from which it continues after it was interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from outrider.core.errors import ConfigError
from outrider.train.files import write_bytes

FILE = "checkpoint.safetensors"
HEAD, MOMENTS = "head.", "moments."


@dataclass(slots=True)
class RunState:
    """The progress of a run."""

    step: int = 0
    """The number of steps that are done."""
    seconds: float = 0.0
    """Time spent on them, over all runs."""
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What was noted of steps and of evaluations on held-out answers, for plots."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """The configuration: a run continues only with its own."""


def save_state(folder: Path, state: RunState, head: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint: the weights, and the optimizer's moments of each. DiskError where there is no room; the last
    one stays."""
    tensors = {f"{HEAD}{name}": each for name, each in head.state_dict().items()}
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"{MOMENTS}{i}.{name}": each for name, each in moments.items()}
    stored = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    write_bytes(folder / FILE, save(stored, {"state": json.dumps(asdict(state))}))


def load_state(folder: Path, settings: dict[str, Any], head: nn.Module, optimizer: Optimizer) -> RunState | None:
    """Continue from the folder's checkpoint; None where there is none. ConfigError where it is of another run."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as stored:
            state = RunState(**json.loads(stored.metadata()["state"]))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); delete it to begin again") from error
    known = json.loads(json.dumps(settings))  # as read from a file: lists for tuples
    differing = sorted(name for name, value in known.items() if state.settings.get(name) != value)
    if differing:
        raise ConfigError(
            f"{folder} holds a run with other {', '.join(differing)}: give its options to continue it, or name another "
            "folder"
        )
    head.load_state_dict({n.removeprefix(HEAD): each for n, each in tensors.items() if n.startswith(HEAD)})
    moments: dict[int, dict[str, Tensor]] = {}
    for name, each in tensors.items():
        if name.startswith(MOMENTS):
            number, part = name.removeprefix(MOMENTS).split(".", 1)
            moments.setdefault(int(number), {})[part] = each.clone()
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return state
