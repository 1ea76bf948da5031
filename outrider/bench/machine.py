"""Where and with what a measurement was made: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from outrider import __version__

PATH = re.compile(r"(?<![\w/.])(?:/[\w.+@~-]+){2,}")
"""What looks like an absolute path."""
ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0xc0", "0xac3"): "Ampere-1",
}
"""By implementer and part, as /proc/cpuinfo has them; the names are those of util-linux."""
LIBRARIES = ("torch", "transformers", "tokenizers", "triton", "numpy")


def machine_facts(device: torch.device | None) -> dict[str, Any]:
    """What the speed depends on, without a name or an address of the machine. device: None where another machine
    computes."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }
    if sys.platform == "linux":
        facts["cores"] = len(os.sched_getaffinity(0))
        facts["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["load_average"] = round(os.getloadavg()[0], 2)
    if device is not None:
        facts |= {"device": str(device), "threads": torch.get_num_threads()}
    if device is not None and device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
    return facts


def versions() -> dict[str, str]:
    """The versions of this package, of Python, and of LIBRARIES."""
    found = {"outrider": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout this package runs from, with + where files differ; empty without one."""
    folder, git = Path(__file__).parents[2], shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    head = _told([git, "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    changed = _told([git, "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return head + ("+" if head and changed else "")


def without_folders(text: str) -> str:
    """The text with absolute paths replaced by their last part, where the parent folder exists on this machine: also
    for a file that is yet to be written."""
    return PATH.sub(lambda found: Path(found[0]).name if Path(found[0]).parent.exists() else found[0], text)


def describe(header: Mapping[str, Any]) -> str:
    """The machine of a run in one line, for people."""
    machine = header["machine"]
    parts = [machine.get("gpu"), machine.get("cpu"), f"{machine.get('cores')} cores", machine.get("system")]
    return ", ".join(str(part) for part in parts if part)


def _told(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - git, found above
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    """The processor's name; its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return told.get("model name") or arm_name(told) or platform.processor() or platform.machine()


def arm_name(told: Mapping[str, str]) -> str:
    """The name of an ARM core, from the numbers that Linux tells; empty without them. told: from /proc/cpuinfo."""
    maker, part = told.get("CPU implementer", ""), told.get("CPU part", "")
    if not maker or not part:
        return ""
    return ARM_CORES.get((maker, part), f"ARM core {part} of {maker}")
