"""The real vLLM behind `outrider serve --engine vllm`: the demo model in float32, with n-gram drafts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from client_vllm import serve_vllm
from process_world import Process
from vllm_world import KEY, NAME, WORDS

from outrider.llm import LLM


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_named() -> None:
    if not os.environ.get("OUTRIDER_TEST_VLLM"):
        pytest.fail("set OUTRIDER_TEST_VLLM to the vllm command, or run make test-vllm")


@pytest.fixture(scope="session")
def vllm() -> Iterator[Process]:
    """A server that is ready."""
    with serve_vllm(NAME, *WORDS, name=NAME) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="session")
def ours() -> LLM:
    """The same model in this package, which drafts nothing."""
    return LLM(NAME, drafter="none", dtype="float32", quantize="none", device="cpu")
