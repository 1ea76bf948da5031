"""For all tests."""

import gc


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: no collection of garbage has to look at them again."""
    gc.collect()
    gc.freeze()
