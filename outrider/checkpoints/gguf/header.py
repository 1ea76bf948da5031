"""A GGUF file's header: its metadata, and where each tensor lies. Every length is checked before it is used."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from outrider.core.errors import ConfigError, reason

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {  # value type in the file -> numpy's name for it
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
SMALLEST_FIELD = 8 + 4 + 1  # an empty key, a type, one byte
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, an offset

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

STORAGE: Mapping[int, tuple[str, int, int]] = {  # common types: name, weights and bytes of a block
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip


class Texts:
    """An array of strings. They are decoded when they are asked for: a vocabulary holds hundreds of thousands."""

    def __init__(self, data: bytes, count: int) -> None:
        """data: each string's length in 8 bytes, and the string."""
        self._data, self._count = data, count

    @cached_property
    def decoded(self) -> list[str]:
        data, unpack, at, out = self._data, U64.unpack_from, 0, []
        for _ in range(self._count):
            start = at + 8
            at = start + unpack(data, at)[0]
            out.append(data[start:at].decode("utf-8", "replace"))
        return out


MetadataValue = bool | int | float | str | list[int] | list[float] | list[bool] | Texts


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as numpy and torch count."""
    kind: int
    """ggml's number for the storage type."""
    start: int
    size: int
    """In bytes."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF file's metadata and its list of tensors."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]


def read_header(file: Path) -> Header:
    """Read a GGUF file's header. Raises ConfigError where it is malformed, truncated or of an unknown version."""
    try:
        if not file.stat().st_size:  # which cannot be mapped
            raise ConfigError(f"{file}: cannot be read as a GGUF file: it is empty; download or convert it again")
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, str(file)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a GGUF file: {reason(error)}") from error


class _Cursor:
    """Reads forward through bytes, never past their end."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.at, self.end = data, where, 0, len(data)

    def fail(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: not a sound GGUF file: {why} (at byte {self.at}); download or convert it again"
        )

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self.at
        if count > self.end - start:
            raise self.fail(f"{count} bytes are announced and {self.end - start} are left")
        self.at = start + count
        return start

    def number(self, layout: struct.Struct) -> int:
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def count(self, smallest: int) -> int:
        """A count of items of at least `smallest` bytes each, checked against the bytes that are left."""
        found = self.number(U64)
        if found * smallest > self.end - self.at:
            raise self.fail(f"{found} items are announced and only {self.end - self.at} bytes are left")
        return found

    def text(self) -> str:
        start = self.skip(self.number(U64))
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def texts(self, count: int) -> Texts:
        """`count` strings, each checked to lie inside the file."""
        data, unpack, at, end = self.data, U64.unpack_from, self.at, self.end
        for _ in range(count):
            if at + 8 > end:
                raise self.fail("a list of strings is cut off")
            at += 8 + unpack(data, at)[0]
            if at > end:
                raise self.fail("a string runs past the end of the file")
        return Texts(data[self.skip(at - self.at) : at], count)

    def scalars(self, kind: int, count: int) -> list[int]:
        dtype = np.dtype(SCALARS[kind])
        start = self.skip(count * dtype.itemsize)
        # bytes, not a view: a view would keep the mmap open
        return np.frombuffer(self.data[start : self.at], dtype=dtype).tolist()

    def value(self, kind: int) -> MetadataValue:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.scalars(kind, 1)[0]
        if kind != ARRAY:
            raise self.fail(f"value type {kind} does not exist")
        kind = self.number(U32)
        if kind == STRING:
            return self.texts(self.count(8))
        if kind not in SCALARS:
            raise self.fail(f"an array of value type {kind} is not read here")
        return self.scalars(kind, self.count(np.dtype(SCALARS[kind]).itemsize))


def _parse(cursor: _Cursor) -> Header:
    if cursor.data[:4] != MAGIC:
        raise cursor.fail("it does not begin with the letters GGUF")
    cursor.skip(4)
    version = cursor.number(U32)
    if version not in VERSIONS:
        raise cursor.fail(
            f"version {version} is not read here, only {' and '.join(map(str, VERSIONS))} (little-endian)"
        )
    tensor_count = cursor.count(SMALLEST_TENSOR)
    metadata: dict[str, MetadataValue] = {}
    for _ in range(cursor.count(SMALLEST_FIELD)):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number(U32))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    base = (cursor.at + alignment - 1) // alignment * alignment
    return Header(metadata, _locate(entries, base, cursor))


TensorEntry = tuple[str, tuple[int, ...], int, int]  # name, shape, storage type, offset from the base


def _tensor_entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.text()
    dims = cursor.number(U32)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([cursor.number(U64) for _ in range(dims)]))  # the file names the fastest first
    return name, shape, cursor.number(U32), cursor.number(U64)


def _locate(entries: list[TensorEntry], base: int, cursor: _Cursor) -> tuple[TensorInfo, ...]:
    """The tensors with their positions in the file, each checked to lie inside it."""
    placed: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in placed:
            raise cursor.fail(f"tensor {name!r} appears twice")
        found = storage_of(kind)
        if found is None:
            raise cursor.fail(
                f"tensor {name!r} has storage type {kind}, which the installed gguf package does not know"
            )
        _, block, block_bytes = found
        if prod(shape) == 0 or shape[-1] % block:
            raise cursor.fail(f"tensor {name!r} has shape {shape}, whose rows are no whole blocks of {block}")
        size = prod(shape) // block * block_bytes
        if base + offset + size > cursor.end:
            raise cursor.fail(
                f"tensor {name!r} ends at byte {base + offset + size} of {cursor.end}: the file is cut off"
            )
        placed[name] = TensorInfo(name, shape, kind, base + offset, size)
    return tuple(placed.values())


def storage_of(kind: int) -> tuple[str, int, int] | None:
    """The name of a storage type, and the weights and bytes of its blocks; None for an unknown type.

    The gguf package, which takes a while to import, is used only for types that are not in STORAGE.
    """
    if kind in STORAGE:
        return STORAGE[kind]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(each): each for each in GGMLQuantizationType}
    return (known[kind].name, *GGML_QUANT_SIZES[known[kind]]) if kind in known else None
