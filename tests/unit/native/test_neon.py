"""The NEON kernels under an emulator: the same bits as the plain ones. Skipped where it or the compiler is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.native.build import ARM_FILES, SOURCES

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-DOUTRIDER_ARM", f"-I{SOURCES}")


@pytest.mark.skipif(not shutil.which(COMPILER) or not shutil.which(EMULATOR), reason=f"needs {COMPILER} and {EMULATOR}")
def test_neon_gives_the_bits_of_the_plain_kernels(tmp_path: Path):
    sources = [Path(__file__).with_name("neon_check.cpp"), SOURCES / "pack.cpp", SOURCES / "kernels_plain.cpp"]
    sources += [SOURCES / name for name in ARM_FILES]
    for source in sources:
        flags = [*FLAGS, *ARM_FILES.get(source.name, ())]
        subprocess.run([COMPILER, *flags, "-c", source, "-o", tmp_path / f"{source.stem}.o"], check=True)
    program = tmp_path / "check"
    subprocess.run([COMPILER, "-static", *tmp_path.glob("*.o"), "-o", program], check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False)
    assert done.stdout == "the same bits\n"
    assert done.returncode == 0
