"""GGUF files, as llama.cpp writes them: read in place, or converted to Hugging Face model folders."""

from outrider.checkpoints.gguf.convert import convert_gguf, refer_to_gguf

__all__ = ["convert_gguf", "refer_to_gguf"]
