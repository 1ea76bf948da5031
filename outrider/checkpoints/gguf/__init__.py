"""GGUF files, as llama.cpp writes them, converted to Hugging Face model folders."""

from outrider.checkpoints.gguf.convert import convert_gguf

__all__ = ["convert_gguf"]
