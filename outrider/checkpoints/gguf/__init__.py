"""GGUF files, as llama.cpp writes them, turned into ordinary model folders."""

from outrider.checkpoints.gguf.write import convert

__all__ = ["convert"]
