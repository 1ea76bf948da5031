"""The real vLLM behind `outrider serve --engine vllm`: the demo model in float32, with n-gram drafts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from process_world import Process
from vllm_world import ENVIRONMENT, KEY, NAME, START_SECONDS, WORDS

from outrider.llm import LLM


@pytest.fixture(scope="session")
def vllm() -> Iterator[Process]:
    """A server that is ready; `make test-vllm` says where vLLM is."""
    command = os.environ.get("OUTRIDER_TEST_VLLM")
    if not command:
        pytest.fail("set OUTRIDER_TEST_VLLM to the vllm command, or run make test-vllm")
    os.environ |= ENVIRONMENT
    server = Process(NAME, *WORDS, "--engine-command", command, name=NAME)
    try:
        server.until_ready(START_SECONDS)
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server
    finally:
        server.popen.terminate()
        server.popen.wait(30)
        server.end()


@pytest.fixture(scope="session")
def ours() -> LLM:
    """The same model in this package, which drafts nothing."""
    return LLM(NAME, drafter="none", dtype="float32", quantize="none", device="cpu")
