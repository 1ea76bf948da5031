"""Outrider: lossless speculative decoding. The same text, sooner."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from outrider.core.collector import collector_paused
from outrider.core.openmp import bound_spinning

if TYPE_CHECKING:
    from outrider.async_llm import AsyncLLM
    from outrider.core.sampling import SamplingParams
    from outrider.engine.results import Comparison, Result
    from outrider.llm import LLM
    from outrider.loading.load import load

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Comparison", "Result", "SamplingParams", "load"]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Comparison": "engine.results",
    "Result": "engine.results",
    "SamplingParams": "core.sampling",
    "load": "loading.load",
}

bound_spinning(os.environ, sys.modules)


def __getattr__(name: str) -> Any:
    """Import on first use: `outrider --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    with collector_paused():
        return getattr(import_module(f"outrider.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What can be imported, also before it was."""
    return [*__all__, "__version__"]
