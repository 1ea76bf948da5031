"""What Ctrl-C does while libraries are being imported. Imports next to nothing itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within, Ctrl-C ends the process without a traceback; torch's own import would lose it. Main thread only."""
    if threading.current_thread() is not threading.main_thread():  # no other is ever interrupted
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
