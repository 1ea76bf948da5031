"""Where downloaded and converted models are stored, how a folder is written atomically, and progress reports."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from outrider.core.errors import FetchError, reason

POLL_S = 0.2


class Progress(Protocol):
    """Receives the progress of a long step, such as a download.

    One step at a time and one call at a time, though `advance` may come from another thread.
    """

    def start(self, label: str, total: int | None) -> None:
        """A step begins. `total` is in the unit of `advance`; None: not known."""

    def advance(self, amount: int) -> None:
        """This much more of the step is done."""

    def done(self) -> None:
        """The step ended. Not called for a step that failed."""


class NoProgress(Progress):
    """A Progress that does nothing."""


def outrider_home() -> Path:
    """Outrider's own folder: OUTRIDER_HOME, or `outrider` in the platform's cache folder. Not created here."""
    if named := os.environ.get("OUTRIDER_HOME"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "outrider"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say to ignore a relative path here.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "outrider"


def models_folder() -> Path:
    """The folder whose subfolders are Outrider's own models: `demo` and converted GGUF files."""
    return outrider_home() / "models"


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """An empty hidden folder next to `folder`, on the same disk; removed at the end, also after an error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise write_error(folder.parent, error) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `folder` when the block ends without an error.

    `folder` is never half-written. Where another process was faster, its result is kept
    and this one is dropped. An OSError in the block becomes a FetchError.
    """
    with scratch_folder(folder) as scratch:
        filling = scratch / folder.name  # made by mkdir, so that it has the user's default permissions
        try:
            filling.mkdir()
            yield filling
            if not folder.is_dir():
                filling.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another process was faster
                raise write_error(folder, error) from error


def write_error(where: Path, error: OSError) -> FetchError:
    fix = "free some space, or name another folder in OUTRIDER_HOME"
    return FetchError(f"{where} cannot be written ({reason(error)}); {fix}")


def size_on_disk(folder: Path) -> int:
    """Bytes of the plain files under a folder that may be changing; links are not followed."""
    total = 0
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except OSError:  # deleted meanwhile
            continue
        total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


@contextmanager
def report_growth(folder: Path, label: str, total: int, progress: Progress) -> Iterator[None]:
    """While the block runs, report to `progress` how many of `total` bytes have arrived under `folder`."""
    stop, before, reported = threading.Event(), size_on_disk(folder), 0

    def watch() -> None:
        nonlocal reported
        while not stop.wait(POLL_S):
            now = min(size_on_disk(folder) - before, total)
            if now > reported:
                progress.advance(now - reported)
                reported = now

    progress.start(label, total)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    progress.advance(total - reported)
    progress.done()
