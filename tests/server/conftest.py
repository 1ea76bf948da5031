"""Servers for tests. `served` is shared by tests that leave it as it was; `serve` starts one of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from server_world import Running, start


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """A server with a toy model, no key, all defaults."""
    running = start()
    yield running
    running.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """serve(target=None, *, max_batch=4, wait=True, **settings) -> Running, stopped at the test's end."""
    started: list[Running] = []

    def call(*args, **options) -> Running:
        started.append(start(*args, **options))
        return started[-1]

    yield call
    for running in started:
        running.stop()
