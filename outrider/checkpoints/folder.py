"""Which folders hold a model that can be loaded safely, and which models are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from outrider.checkpoints.storage import models_folder
from outrider.core.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SOURCE_BITS = "outrider.source_bits"
"""Metadata key of converted safetensors files: bits per weight of the source, which can be packed again losslessly."""
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_PICKLES = (
    "pickle files can run code and are never read; load the model with Transformers once and save it with "
    "`model.save_pretrained(FOLDER)`, which writes safetensors; of a drafting head, save the weights alone: "
    "`safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`"
)


GGUF_FILE = "gguf.json"
"""In a folder made for a GGUF file, it says where that file is. It is followed only in Outrider's own folder, since a
downloaded model must not name files elsewhere."""


@dataclass(frozen=True, slots=True)
class GGUFReference:
    """The GGUF file that a folder's weights are read from."""

    file: str
    size: int
    mtime_ns: int
    storage: str
    """The storage type that most weights have, such as Q4_K."""
    bits: int
    """Bits per weight of that type."""

    @staticmethod
    def to_file(file: Path, storage: str, bits: int) -> GGUFReference:
        found = file.stat()
        return GGUFReference(str(file.resolve()), found.st_size, found.st_mtime_ns, storage, bits)

    def write(self, folder: Path) -> None:
        (folder / GGUF_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def checked_file(self) -> Path:
        """The file. ConfigError where it is gone or has changed."""
        file = Path(self.file)
        try:
            found = file.stat()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror}); name the .gguf file where it is now"
            ) from error
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ConfigError(f"{file} has changed since it was first read; name the .gguf file itself")
        return file


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """An installed model, by the name that `resolve` takes."""

    name: str
    path: Path
    size: int
    """In bytes, on disk."""
    architecture: str
    parameters: int


def check_folder(folder: Path) -> Path:
    """The same folder. Raises ConfigError unless it holds a model that can be loaded safely."""
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "an adapter must be merged into its base model first" if adapter else "name the folder that holds it"
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder; {hint}")
    files = weight_files(folder)
    if not files and (folder / GGUF_FILE).is_file():
        raise ConfigError(
            f"{folder} refers to a .gguf file elsewhere, so it cannot be copied; name that file, or convert it with "
            "`outrider pull FILE` and copy what that writes"
        )
    if not files:
        pickled = any(next(folder.glob(pattern), None) for pattern in PICKLE_PATTERNS)
        hint = NO_PICKLES if pickled else "the weights are missing; download or save the model again"
        raise ConfigError(f"{folder} has no .safetensors file: {hint}")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model: those its index names, or all in the folder; or the GGUF file it refers to.

    Raises ConfigError where the index is broken, or a file is missing or lies outside the folder.
    """
    if reference := gguf_of(folder):
        return [reference.checked_file()]
    index = folder / INDEX_FILE
    found = _read_index(index) if index.is_file() else [file.name for file in folder.glob("*.safetensors")]
    return [_checked_file(folder, name) for name in sorted(found)]


def gguf_of(folder: Path) -> GGUFReference | None:
    """The GGUF file that a folder of Outrider's own refers to; None where it refers to none."""
    note = folder / GGUF_FILE
    if folder.resolve().parent != models_folder().resolve() or not note.is_file():
        return None
    try:
        return GGUFReference(**json.loads(note.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{note} is damaged ({error}); delete {folder}, and name the .gguf file again") from error


def source_bits(folder: Path) -> int:
    """Bits per weight before the model was converted to floats; 0 where the files do not say."""
    from safetensors import safe_open

    if reference := gguf_of(folder):
        return reference.bits
    for file in weight_files(folder)[:1]:
        with safe_open(file, "pt") as tensors:
            bits = (tensors.metadata() or {}).get(SOURCE_BITS, "")
            return int(bits) if bits.isdecimal() else 0
    return 0


def _read_index(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} is not a sound index of weights ({error!r}); download or save the model again"
        ) from error
    for name in names:
        # A file name only: no folder, no drive, no parent.
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}; a weight file lies beside the index and ends in .safetensors")
    return list(names)


def _checked_file(folder: Path, name: str) -> Path:
    """A weight file. Raises ConfigError where it is missing or a link out of the folder."""
    file, own = folder / name, folder.resolve()
    if not file.is_file():
        raise ConfigError(f"{file} is not there; download or save the model again")
    allowed = {own}
    if own.parent.name == "snapshots":  # a Hugging Face cache links from there to its blobs
        allowed.add(own.parent.parent / "blobs")
    if file.resolve().parent not in allowed:
        raise ConfigError(
            f"{file} is a link to {file.resolve()}, outside the model's folder; put the file itself there"
        )
    return file


def installed_models() -> list[InstalledModel]:
    """The installed models, sorted: Outrider's own and those in the Hugging Face cache. Broken ones are left out."""
    found: list[InstalledModel] = []
    for name, folder in [*_own_models(), *_hub_models()]:
        try:
            found.append(_describe(name, check_folder(folder)))
        except (ConfigError, OSError, ValueError):
            continue
    return sorted(found, key=lambda model: model.name)


def _own_models() -> Iterator[tuple[str, Path]]:
    folder = models_folder()
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir() and not child.name.startswith("."):
            yield child.name, child


def _hub_models() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import constants

    for snapshot in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*"):
        repo = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
        yield f"{repo}@{snapshot.name}", snapshot


def _describe(name: str, folder: Path) -> InstalledModel:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} is not a JSON object")
    files = {*weight_files(folder), *(file for file in folder.iterdir() if file.is_file())}
    size = sum(file.stat().st_size for file in files)
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    return InstalledModel(name, folder, size, str(architectures[0]), _count_parameters(folder))


def _count_parameters(folder: Path) -> int:
    """The number of weights; a tensor that is both embedding and output head counts once."""
    if reference := gguf_of(folder):
        from outrider.checkpoints.gguf.weights import open_gguf

        return sum(tensor.elements for tensor in open_gguf(reference.checked_file()).tensors.values())
    from safetensors import SafetensorError, safe_open

    parameters = 0
    for file in weight_files(folder):
        try:
            with safe_open(file, "np") as weights:
                names = list(weights.keys())
                parameters += sum(prod(weights.get_slice(name).get_shape()) for name in names)
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a sound safetensors file: {error}") from error
    return parameters
