"""What goes for all tests."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is: the limits of hypothesis, which are of the clock, are no test.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def pytest_collection_finish() -> None:
    """Leave what was collected out of every search for garbage: one over ten thousand tests takes half a second."""
    gc.collect()
    gc.freeze()
