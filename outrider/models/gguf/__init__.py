"""GGUF files, as llama.cpp writes them, turned into ordinary model folders."""

from outrider.models.gguf.convert import convert

__all__ = ["convert"]
