"""Tiny models as GGUF files."""

import pytest
from tiny_gguf import random_model, tiny_llama


@pytest.fixture(scope="module")
def tiny_model():
    """A tiny llama with random weights."""
    return random_model("llama")


@pytest.fixture
def tiny(tmp_path):
    """A tiny llama as GGUF, and the model it came from."""
    file = tmp_path / "tiny.gguf"
    return file, tiny_llama(file)
