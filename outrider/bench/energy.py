"""The energy a device has used, where it has a counter: NVML's on NVIDIA GPUs, RAPL's on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Reads a counter of joules. `source` names it; empty where there is none."""

    source: str = ""
    read: Callable[[], float] = lambda: 0.0
    wraps_at: float = 0.0
    """Joules at which the counter wraps to 0; 0: never."""

    def since(self, before: float) -> float | None:
        """Joules since the reading `before`; None without a counter. A lower reading counts as one wrap to 0."""
        if not self.source:
            return None
        used = self.read() - before
        return used + self.wraps_at if used < 0 else used


def energy_meter(device: torch.device, rapl: Path = RAPL) -> EnergyMeter:
    """The meter of a device: of the whole GPU, or of all CPU packages, with whatever else runs on them."""
    if device.type == "cuda":
        return _nvml_meter(str(torch.cuda.get_device_properties(device).uuid)) or EnergyMeter()
    return _rapl_meter(rapl) or EnergyMeter()


def _rapl_meter(root: Path) -> EnergyMeter | None:
    """The sum over the packages; None where there are none or they are not readable."""
    counters = sorted(root.glob("intel-rapl:[0-9]*/energy_uj"))
    counters = [file for file in counters if file.parent.name.count(":") == 1]  # packages, not their parts

    def read() -> float:
        return sum(int(file.read_text()) for file in counters) / 1e6

    try:
        read()
        ranges = [int((file.parent / "max_energy_range_uj").read_text()) for file in counters]
    except (OSError, ValueError):
        return None
    return EnergyMeter("RAPL, all packages", read, ranges[0] / 1e6) if counters else None


def _nvml_meter(uuid: str) -> EnergyMeter | None:
    """NVML's counter since the driver was loaded, in millijoules; None where the library or the counter is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None

    def read() -> float:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        return -1.0 if failed else energy.value / 1e3

    return EnergyMeter("NVML, the whole GPU", read) if read() >= 0 else None
