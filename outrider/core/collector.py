"""Pausing Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector inside the `with` block. Imports and vocabularies create hundreds of thousands of
    objects, all of which stay: searching them for garbage would take a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
