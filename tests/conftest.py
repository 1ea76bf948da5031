"""What goes for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leave what was collected out of every search for garbage: one over ten thousand tests takes half a second."""
    gc.collect()
    gc.freeze()
