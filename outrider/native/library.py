"""The library of CPU kernels as Python calls it. Its structures are those of src/pass.h and src/heads.h."""

from __future__ import annotations

import ctypes as c
import logging
import os
from functools import cache
from typing import Any

from outrider.core.errors import OutriderError
from outrider.native.build import BuildError, find_or_build

log = logging.getLogger(__name__)
VERSION = 3


class Product(c.Structure):
    """One linear layer: up to three tensors, whose outputs are concatenated."""

    _fields_ = [("parts", c.c_void_p * 3), ("bias", c.c_void_p)]


class Layer(c.Structure):
    _fields_ = [
        *((name, c.c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c.c_void_p) for name in ("q_norm", "k_norm", "keys", "values", "cos_sin")),
        *((name, c.c_int64) for name in ("window", "inputs")),
    ]


class Model(c.Structure):
    _fields_ = [
        *((name, c.c_int64) for name in ("layer_count", "hidden", "wide", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c.c_int64) for name in ("slots", "page_bits", "positions", "skip", "halves")),
        *((name, c.c_float) for name in ("eps", "scale", "embedding_scale")),
        ("embedding", c.c_void_p),
        ("norm", c.c_void_p),
        ("head", Product),
        ("layers", c.POINTER(Layer)),
    ]


class Sequence(c.Structure):
    _fields_ = [
        *((name, c.c_int64) for name in ("rows", "start", "text")),
        ("table", c.c_void_p),
        ("pages", c.c_int64),
        ("parents", c.c_void_p),
        ("whole", c.c_int64),
    ]


class Pass(c.Structure):
    _fields_ = [
        *((name, c.c_int64) for name in ("rows", "sequence_count", "wanted_count", "tap_count", "threads")),
        *((name, c.c_void_p) for name in ("ids", "positions", "slots", "embedded")),
        ("sequences", c.POINTER(Sequence)),
        *((name, c.c_void_p) for name in ("wanted", "taps", "features", "kept_tokens", "kept_features")),
        *((name, c.c_void_p) for name in ("hidden", "logits")),
        *((name, c.c_void_p) for name in ("chosen", "seeds", "temperatures")),
    ]


class Table(c.Structure):
    """Rows to look up."""

    _fields_ = [
        *((name, c.c_void_p) for name in ("blocks", "rows")),
        *((name, c.c_int64) for name in ("kind", "count", "columns")),
    ]


class Head(c.Structure):
    _fields_ = [
        ("model", Model),
        ("embedding", Table),
        ("tokens", c.c_void_p),
        ("fc", Product),
        ("features", c.c_int64),
        *((name, c.c_void_p) for name in ("kept_tokens", "kept_features")),
    ]


class BlockHead(c.Structure):
    _fields_ = [
        ("head", Head),
        ("context_norm", c.c_void_p),
        *((name, c.c_int64) for name in ("rows", "causal", "anchored")),
        *((name, c.c_void_p) for name in ("mask", "before")),
        ("after", Product),
        ("rank", c.c_int64),
        ("confidence", c.c_void_p),
        ("confidence_columns", c.c_int64),
    ]


class StepHead(c.Structure):
    _fields_ = [
        ("head", Head),
        ("feature_norm", c.c_void_p),
        ("feature_norm_columns", c.c_int64),
        *((name, c.c_void_p) for name in ("embedding_norm", "hidden_norm")),
        *((name, c.c_int64) for name in ("normed_residual", "norm_output")),
    ]


class Drafts(c.Structure):
    _fields_ = [
        *((name, c.c_int64) for name in ("count", "tokens", "threads")),
        *((name, c.c_void_p) for name in ("table_ids", "lengths", "last", "firsts", "seeds", "temperatures", "tables")),
        ("table_pages", c.c_int64),
        *((name, c.c_void_p) for name in ("chosen", "hidden", "logits", "confidences")),
        *((name, c.c_int64) for name in ("nodes", "tree_width")),
        ("parents", c.c_void_p),
    ]


_POINTER, _SIZE = c.c_void_p, c.c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "version": (c.c_int32, []),
    "struct_bytes": (_SIZE, [c.c_int32]),
    "kernels": (c.c_char_p, []),
    "use_kernels": (c.c_int32, [c.c_char_p]),
    "pack": (c.c_char_p, [c.c_int32, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, c.POINTER(_POINTER)]),
    "like": (c.c_char_p, [_POINTER, _SIZE, c.POINTER(_POINTER)]),
    "copy_rows": (c.c_char_p, [_POINTER, _POINTER, _POINTER, _POINTER, _SIZE]),
    "free": (None, [_POINTER]),
    "bytes": (_SIZE, [_POINTER]),
    "rows": (c.c_char_p, [_POINTER, _POINTER, _SIZE, _POINTER]),
    "product": (c.c_char_p, [c.POINTER(Product), _POINTER, _SIZE, _SIZE, _SIZE, _POINTER]),
    "quantize": (None, [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER]),
    "pass": (c.c_char_p, [c.POINTER(Model), c.POINTER(Pass)]),
    "draft_blocks": (c.c_char_p, [c.POINTER(BlockHead), c.POINTER(Drafts)]),
    "draft_steps": (c.c_char_p, [c.POINTER(StepHead), c.POINTER(Drafts)]),
}


class Library:
    """The loaded library. `call` raises an error with the message of the function that failed."""

    def __init__(self, file: str) -> None:
        loaded = c.CDLL(file)
        self._functions = {name: loaded[f"outrider_{name}"] for name in SIGNATURES}
        for name, (result, arguments) in SIGNATURES.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments

    def call(self, name: str, *arguments: object) -> int:
        """The number that a function returns; 0 for functions that return none, or text only when they fail."""
        found = self._functions[name](*arguments)
        if isinstance(found, bytes):
            raise OutriderError(f"the CPU kernels refuse {name}: {found.decode()}")
        return found or 0

    @property
    def kernels(self) -> str:
        """The instruction set in use: plain, avx2, avx512, amx, neon or neon-dot."""
        return self._functions["kernels"]().decode()


def library() -> Library | None:
    """The library, built first where necessary; None where it is not available.

    OUTRIDER_NATIVE=0: None; 1: also where it has only the plain kernels for this processor, which are slower than
    PyTorch's operators.
    """
    asked = os.environ.get("OUTRIDER_NATIVE")
    return None if asked == "0" else _load(plain=asked == "1")


@cache
def _load(plain: bool) -> Library | None:
    try:
        found = Library(str(find_or_build()))
    except (BuildError, OSError) as error:
        log.warning("packed weights run on PyTorch's operators, which are slower than the CPU kernels: %s", error)
        return None
    if found.call("version") != VERSION:
        log.warning("packed weights run on PyTorch's operators: the installed CPU kernels are of another version")
        return None
    if found.kernels == "plain" and not plain:
        log.warning(
            "packed weights run on PyTorch's operators: the CPU kernels need AVX2 or NEON, which this processor lacks"
        )
        return None
    return found
