"""What a model's speed depends on, and how much of a device's memory its draft models will take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from platform import processor

import torch

from outrider.core.errors import ConfigError
from outrider.loading.load import LoadedModel, choose_device
from outrider.loading.memory import ReservedMemory, reserved_memory_of


def speed_facts(loaded: LoadedModel) -> tuple[object, ...]:
    """All that the times of a model's passes depend on: measured times hold for any model with equal facts."""
    device = loaded.target.device
    threads = loaded.threads.partition(" ")[0]  # the number alone, not how it was found
    cpu = f"{processor()} {os.cpu_count()} cores, {threads} threads"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return (torch.__version__, machine, loaded.folder, loaded.format, loaded.kernels, loaded.pinned)


def memory_for_drafts(models: Iterable[tuple[str, str, int, bool]], device: str) -> ReservedMemory:
    """The memory that draft models will take on a CUDA device.

    models: for each (name, device, rows of its head that are copied, whether its MTP module alone is loaded); an empty
    device is the target's.
    """
    here = choose_device(device)
    if here.type != "cuda":
        return ReservedMemory()
    with draft_errors():
        parts = [
            reserved_memory_of(name, vocab=vocab, module=module)
            for name, other, vocab, module in models
            if not other or choose_device(other) == here
        ]
        return sum(parts, ReservedMemory())


@contextmanager
def draft_errors() -> Iterator[None]:
    """Inside the `with` block, the message of a ConfigError says that it is about the draft model."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"draft model: {error}") from error
