"""The garbage collector pauses, and then is as it was."""

from __future__ import annotations

import gc

import pytest

from outrider.core.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_is_then_as_it_was(enabled: bool):
    try:
        if not enabled:
            gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
