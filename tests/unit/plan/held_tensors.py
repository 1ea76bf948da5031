"""What an engine really holds: every tensor that can be reached from it, each memory once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from outrider.native.tensors import BlockTensor

LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, torch.dtype, torch.device, Path, Enum)


def tensors_of(root: Any) -> dict[int, int]:
    """Address and size of the memory behind every tensor that the object refers to, directly or not."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if isinstance(each, LEAVES) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            memory = each.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
        elif isinstance(each, BlockTensor):
            found[each.handle] = each.nbytes
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        else:
            left += [*vars(each).values()] if hasattr(each, "__dict__") else []
            names = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            left += [getattr(each, name) for name in names if hasattr(each, name)]
    return found


def held_bytes(root: Any) -> int:
    return sum(tensors_of(root).values())


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that torch allocates at once on the CPU while this runs, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    with tempfile.TemporaryDirectory() as folder:
        watched.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    steps = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = steps[0]["Total Allocated"] - steps[0]["Bytes"]
    return max(step["Total Allocated"] for step in steps) - before
