"""Files that a killed run or a full disk never leaves half-written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError


class DiskError(OutriderError):
    """A file could not be written. What was written before is intact."""


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside it first, then renamed. DiskError where that fails."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, file)
    except OSError as error:
        raise disk_error(file, error) from error
    finally:
        beside.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    write_bytes(file, text.encode())


def write_json(file: Path, value: Any) -> None:
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def disk_error(file: Path, error: OSError) -> DiskError:
    """An error that says what happened, that nothing is lost, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(
            f"{file}: the disk is full. What was written before is intact: free some space, and run the same command "
            "again to continue, with --resume where it trains"
        )
    return DiskError(f"{file} cannot be written ({error.strerror or error}); what was written before is intact")
