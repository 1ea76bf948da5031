"""Servers for tests. `served` is shared by tests that leave it as it was; `serve` starts one of one's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_world import VLLM, Serve, Served, server, servers


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server with a toy model, no key, all defaults; one with vLLM where clients are tested through it."""
    with server() as running:
        yield running


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """serve(target=None, *, max_batch=4, wait=True, **settings) -> Running, stopped at the test's end.

    Before vLLM: serve(*, api_keys=()) -> RemoteServer.
    """
    with servers(request.getfixturevalue("served") if VLLM else None) as call:
        yield call
