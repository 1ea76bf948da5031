"""Opens the checkpoints of drafting heads.

Tensors are known by their names in the `speculators` layout, to which the names of other layouts are translated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.checkpoints.folder import weight_files
from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError
from outrider.models.heads.mtp_layout import MtpLayout, mtp_modules

MAX_CONFIG_BYTES = 1 << 20
_PREFIXES = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
"""Prefixes of names in other layouts -> in the `speculators` layout."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's checkpoint, opened: its config.json, and where its tensors are."""

    folder: Path
    config_json: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor, by its name in the `speculators` layout."""
    places: dict[str, tuple[Path, str]]
    """The file of each tensor, and its name there."""
    mtp: MtpLayout | None = None
    """The layout of the MTP module, where that is the head: only its tensors are then listed."""

    @property
    def numbers(self) -> int:
        """The number of weights in all tensors."""
        return sum(prod(shape) for shape in self.shapes.values())

    def read(self, name: str) -> Tensor:
        """A copy of one tensor, as it is stored, on the CPU."""
        file, stored = self.places[name]
        with safe_open(file, "pt") as tensors:
            return tensors.get_tensor(stored).clone()

    def has(self, pattern: str) -> bool:
        """Whether some tensor's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.shapes)


def open_head(name: str) -> HeadFiles:
    """The checkpoint of a head, or of a model with an MTP module: a folder or a Hugging Face id.

    Only safetensors are read. ConfigError where it is none, or damaged.
    """
    folder = resolve(name)
    file = folder / "config.json"
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} has more than {MAX_CONFIG_BYTES} bytes, so it is no head's; name a head's folder")
    try:
        config_json = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); download or save the head again") from error
    if not isinstance(config_json, dict):
        raise ConfigError(f"{file} is not a JSON object; download or save the head again")
    return known_files(folder, config_json, _stored_tensors(name, folder))


def known_files(
    folder: Path, config_json: dict[str, Any], stored: Mapping[str, tuple[Path, tuple[int, ...]]]
) -> HeadFiles:
    """A checkpoint, from the headers of its files. stored: the file and the shape of every tensor. ConfigError where
    two tensors have the same name in the `speculators` layout."""
    for prefix, layout in mtp_modules(stored).items():
        return _mtp_files(folder, config_json, stored, prefix, layout)  # the first one
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[Path, str]] = {}
    for each, (weights, shape) in stored.items():
        known = _known_name(each)
        if known in places:
            raise ConfigError(f"{weights}: {each} and {places[known][1]} are the same tensor of a head")
        if not known.endswith("inv_freq"):
            shapes[known], places[known] = shape, (weights, each)
    return HeadFiles(folder, config_json, shapes, places)


def _stored_tensors(name: str, folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """The file and the shape of every tensor in a folder. name: what was asked for, for errors."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for weights in weight_files(folder):
        if weights.suffix != ".safetensors":
            raise ConfigError(f"{name} is a GGUF file; a head is a folder with config.json and .safetensors")
        try:
            with safe_open(weights, "pt") as tensors:
                for stored in tensors.keys():  # noqa: SIM118
                    if stored in found:
                        raise ConfigError(f"{weights} and {found[stored][0]} both hold {stored}; leave one of them")
                    found[stored] = weights, tuple(tensors.get_slice(stored).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{weights} is not a sound safetensors file ({error}); download it again") from error
    return found


def _mtp_files(
    folder: Path,
    config_json: dict[str, Any],
    stored: Mapping[str, tuple[Path, tuple[int, ...]]],
    prefix: str,
    layout: MtpLayout,
) -> HeadFiles:
    """The tensors of the module with this prefix, without those of later modules and layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[Path, str]] = {}
    for name, (weights, shape) in stored.items():
        known = layout.known_name(name.removeprefix(prefix))
        if name.startswith(prefix) and not re.match(r"layers\.[1-9]", known):
            shapes[known], places[known] = shape, (weights, name)
    return HeadFiles(folder, config_json, shapes, places, layout)


def _known_name(stored: str) -> str:
    for prefix, known in _PREFIXES.items():
        if stored.startswith(prefix):
            stored = known + stored.removeprefix(prefix)
    return stored
