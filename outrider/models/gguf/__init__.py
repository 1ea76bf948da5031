"""GGUF files, as llama.cpp writes them, turned into ordinary model folders."""

from outrider.models.gguf.write import convert

__all__ = ["convert"]
