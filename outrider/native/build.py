"""Find or build the library of CPU kernels: as installed, in Outrider's folder, or compiled there now."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY_NAME = "liboutrider.so"
INSTALLED = Path(__file__).parent / LIBRARY_NAME
"""The library built with the package; the file beside it that ends in .key identifies its sources."""
COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    "-ffp-contract=off",  # a sum has the same bits wherever it is written
)
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
AMX_FLAGS = (*AVX512_FLAGS, "-mamx-tile", "-mamx-int8")
AMX_FILE = "kernels_amx.cpp"
X86_FILES = {"kernels_avx2.cpp": AVX2_FLAGS, "kernels_avx512.cpp": AVX512_FLAGS, AMX_FILE: AMX_FLAGS}
ARM_FLAGS = ("-fno-schedule-insns",)  # as on x86: sums of several rows must stay in registers
ARM_FILES = {"kernels_neon.cpp": ARM_FLAGS, "kernels_neon_dot.cpp": (*ARM_FLAGS, "-march=armv8.2-a+dotprod")}
"""Compiled for instructions that not every processor has; the library asks the processor before it uses them."""
COMPILERS = ("g++", "clang++", "c++")
MAX_SECONDS = 300


class BuildError(Exception):
    """Why there is no library, and what would help."""


def find_or_build() -> Path:
    """The library's file. BuildError where it is neither installed nor can be built."""
    if _read(INSTALLED.with_suffix(".key")) == _sources_key():
        return INSTALLED
    from outrider.checkpoints.storage import outrider_home  # here: a build imports this file alone

    compiler = find_compiler()
    file = outrider_home() / "native" / _key(compiler) / LIBRARY_NAME
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
                build(compiler, Path(scratch) / LIBRARY_NAME).replace(file)
        except OSError as error:
            raise BuildError(
                f"{file.parent} cannot be written ({error}); name another folder in OUTRIDER_HOME"
            ) from error
    return file


def install() -> Path:
    """Build the library into the package itself, for a wheel or an editable install."""
    with tempfile.TemporaryDirectory() as scratch:
        built = build(find_compiler(), Path(scratch) / LIBRARY_NAME)
        uninstall()  # a process may have the old file open: it is replaced, not written to
        shutil.copy(built, INSTALLED)
    INSTALLED.with_suffix(".key").write_text(_sources_key(), encoding="ascii")
    return INSTALLED


def uninstall() -> None:
    """Remove what `install` wrote."""
    for file in (INSTALLED, INSTALLED.with_suffix(".key")):
        file.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    """The command of a C++ compiler: that of the variable CXX, or the first that is installed."""
    if sys.platform == "win32":
        raise BuildError("the CPU kernels are not built on Windows; use WSL")
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("no C++ compiler is here; install one, for example g++, and start again")
    return [found]


def build(compiler: Seq[str], file: Path) -> Path:
    """Compile the sources to this file, in a folder where object files may lie too."""
    define, own = {
        **dict.fromkeys(("x86_64", "amd64"), ("-DOUTRIDER_X86", X86_FILES)),
        **dict.fromkeys(("aarch64", "arm64"), ("-DOUTRIDER_ARM", ARM_FILES)),
    }.get(platform.machine().lower(), ("", {}))
    flags = [*COMMON_FLAGS, *([define] if define else [])]
    others = (X86_FILES.keys() | ARM_FILES.keys()) - own.keys()
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name not in others]

    def compile_one(source: Path) -> str:
        out = file.parent / f"{source.stem}.o"
        named = ("-c", str(source), "-o", str(out))
        try:
            _run([*compiler, *flags, *own.get(source.name, ()), *named])
        except BuildError:
            if source.name != AMX_FILE:
                raise
            _run([*compiler, *flags, *AVX512_FLAGS, "-DOUTRIDER_NO_AMX", *named])  # for a compiler without AMX
        return str(out)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    _run([*compiler, "-shared", "-pthread", *objects, "-o", str(file)])
    return file


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 (our own arguments and the user's compiler, no shell)
            command, capture_output=True, text=True, errors="replace", timeout=MAX_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run ({error})") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit status {done.returncode}"]
        raise BuildError(f"{command[0]} could not compile the CPU kernels ({lines[0].strip()})")
    return done.stdout


def _key(compiler: Seq[str]) -> str:
    """The name of a build: it changes with the sources, the flags, the compiler and the kind of machine."""
    told = repr((list(compiler), _run([*compiler, "--version"]), platform.machine(), _sources_key()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _sources_key() -> str:
    digest = hashlib.sha256(repr((COMMON_FLAGS, X86_FILES, ARM_FILES)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii") if file.is_file() else ""
