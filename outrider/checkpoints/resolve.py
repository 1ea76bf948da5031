"""From a model's name to its local folder: a folder, a GGUF file, `demo`, or a Hugging Face id."""

from __future__ import annotations

import glob
import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from outrider.checkpoints.demo import pull_demo
from outrider.checkpoints.folder import NO_PICKLES, check_folder, gguf_of
from outrider.checkpoints.gguf import convert_gguf, refer_to_gguf
from outrider.checkpoints.hub import hub_errors
from outrider.checkpoints.storage import NoProgress, Progress, models_folder, outrider_home, report_growth
from outrider.core.errors import ConfigError, FetchError

# Data of known formats, from the repository's top folder only. No code, no pickle.
ALLOW_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
IGNORE_PATTERNS = ["*/*", "consolidated*"]  # `consolidated` is a second copy of the weights in Mistral's own format
CONVERTER_VERSION = 2  # part of a converted file's key: raise it when the conversion changes
log = logging.getLogger(__name__)


def resolve(path_or_id: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The local folder of a model, downloaded first where necessary. That of a .gguf file refers to the file.

    Takes `demo`, a folder, a .gguf file, the name of an installed model, or a Hugging Face
    id: `org/name` or `org/name@revision`. Raises ConfigError or FetchError where there is none.
    """
    if path_or_id == "demo":
        _no_revision(path_or_id, revision)
        return pull_demo(progress=progress)
    if path := local_path(path_or_id):
        _no_revision(path_or_id, revision)
        return check_folder(path) if path.is_dir() else _refer_to_file(path)
    repo, _, named = path_or_id.partition("@")
    if revision is not None and named and named != revision:
        raise ConfigError(f"{path_or_id} names one revision and {revision!r} is another; give one of them")
    return check_folder(_download_snapshot(repo, revision or named or "main", progress or NoProgress()))


def check_name(path_or_id: str) -> None:
    """Raise ConfigError for what `resolve` would refuse, without downloading or converting anything."""
    path = None if path_or_id == "demo" else local_path(path_or_id)
    if path and path.is_dir():
        check_folder(path)


def local_path(path_or_id: str) -> Path | None:
    """The folder or file a name means; None where it is a Hugging Face id. Raises ConfigError where it is neither."""
    path = Path(path_or_id).expanduser()
    if not path.exists() and re.fullmatch(r"\w[\w.-]*", path_or_id):
        path = models_folder() / path_or_id
    if path_or_id and path.exists():  # an empty name would be the current folder
        return path
    repo = path_or_id.partition("@")[0]
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo) or repo.endswith(".gguf"):
        raise ConfigError(
            f"there is no file or folder {path_or_id!r}, and it is no Hugging Face id (org/name or org/name@revision); "
            "`demo` is a small model to try, and `outrider list` shows the models that are here"
        )
    return None


def cached_folder(hub_id: str, revision: str | None = None) -> Path | None:
    """The folder of a Hugging Face id that is cached completely; None where it would have to be downloaded."""
    from huggingface_hub import snapshot_download

    repo, _, named = hub_id.partition("@")
    ref = _ref_file(repo, revision or named or "main")
    sha = ref.read_text(encoding="utf-8") if ref.is_file() else revision or named or "main"
    try:
        return check_folder(Path(str(snapshot_download(repo, revision=sha, local_files_only=True))))
    except Exception:  # whatever is missing: the hub has it
        return None


def _ref_file(repo: str, revision: str) -> Path:
    """Holds the commit that a revision was resolved to last time."""
    return outrider_home() / "refs" / f"{quote(repo, safe='')}@{quote(revision, safe='')}"


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(f"{name} is not a Hugging Face id and has no revision {revision!r}; leave the revision out")


def convert_file(file: Path, progress: Progress | None = None) -> Path:
    """The folder that a GGUF file is converted into, in bfloat16. It can be copied and does not need the file."""
    import torch

    folder = models_folder() / f"{file.stem}-{_file_key(file, CONVERTER_VERSION)}-bf16"
    if not folder.is_dir():
        convert_gguf(file, folder, progress, torch.bfloat16)
    return check_folder(folder)


def _refer_to_file(file: Path) -> Path:
    """The folder of a GGUF file: its config and tokenizer. The weights stay where they are."""
    folder = models_folder() / f"{file.stem}-{_file_key(file, CONVERTER_VERSION)}"
    if not folder.is_dir():
        refer_to_gguf(file, folder)
        _drop_outdated(file, folder)
    old = models_folder() / f"{file.stem}-{_file_key(file, 1)}"
    if old.is_dir():
        log.warning("%s is a copy of %s by an earlier version; it is not read any more and can be deleted", old, file)
    return check_folder(folder)


def _drop_outdated(file: Path, folder: Path) -> None:
    """Delete the folders that refer to this file as it was before it changed. They hold no weights."""
    for other in folder.parent.glob(f"{glob.escape(file.stem)}-*"):
        with suppress(ConfigError):
            reference = gguf_of(other)
            if other != folder and reference is not None and reference.file == str(file.resolve()):
                shutil.rmtree(other, ignore_errors=True)


def _file_key(file: Path, version: int) -> str:
    """Identifies a GGUF file as it is now. ConfigError for a file of another kind."""
    if file.suffix.lower() != ".gguf":
        raise ConfigError(f"{file} is a file; a model is a folder with config.json and .safetensors, or a .gguf file")
    found = file.resolve().stat()
    text = f"{file.resolve()}|{found.st_size}|{found.st_mtime_ns}|{version}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _download_snapshot(repo: str, revision: str, progress: Progress) -> Path:
    """A snapshot of a Hugging Face repository: the revision is resolved to a commit, and that is downloaded.

    Where the hub cannot be reached, the commit this revision was resolved to last time, if it is cached.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    ref = _ref_file(repo, revision)
    try:
        with hub_errors(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
            cache = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
            with report_growth(cache, f"downloading {repo}", _wanted_bytes(repo, info), progress), _no_hub_bars():
                folder = snapshot_download(
                    repo, revision=info.sha, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS
                )
    except ConfigError:
        raise
    except Exception as error:  # whatever its network library raises, which differs between releases
        return _cached_snapshot(repo, revision, ref, error)
    with suppress(OSError):  # only needed without a network; a home that cannot be written has no other use for it
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(str(info.sha), encoding="utf-8")
    return Path(str(folder))


def _wanted_bytes(repo: str, info: Any) -> int:
    """Bytes to download. Raises ConfigError where the repository has nothing that can be loaded."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = {
        name: size
        for name, size in sizes.items()
        if any(fnmatch(name, pattern) for pattern in ALLOW_PATTERNS)
        and not any(fnmatch(name, pattern) for pattern in IGNORE_PATTERNS)
    }
    if "config.json" not in wanted:
        raise ConfigError(
            f"{repo} has no config.json, so it is no model for here; GGUF files are read from disk, by path"
        )
    if not any(name.endswith(".safetensors") for name in wanted):
        raise ConfigError(f"{repo} has no .safetensors weights: {NO_PICKLES}")
    return sum(wanted.values())


def _cached_snapshot(repo: str, revision: str, ref: Path, error: Exception) -> Path:
    """The cached snapshot of the commit in `ref`. Raises FetchError with the reason where it is incomplete."""
    from huggingface_hub import snapshot_download

    sha = ref.read_text(encoding="utf-8") if ref.is_file() else revision
    try:
        found = snapshot_download(
            repo, revision=sha, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS, local_files_only=True
        )
    except Exception as missing:
        raise FetchError(
            f"{repo} could not be fetched, and is not here yet ({type(error).__name__}: {error}); "
            "check the network, the proxy and HF_HUB_OFFLINE, or copy the model's folder here and name its path"
        ) from missing
    return Path(str(found))


@contextmanager
def _no_hub_bars() -> Iterator[None]:
    """While the block runs, the hub library draws no progress bars of its own."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
