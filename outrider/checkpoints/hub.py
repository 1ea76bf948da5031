"""What the Hugging Face hub says of a model that is not downloaded: its configuration, and its tensors' headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError, FetchError


@contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """While the block runs, turn the hub's refusals into FetchErrors, and that of a malformed id into a ConfigError."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise FetchError(
            f"{repo} asks for its terms to be accepted: do so on its page, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"Hugging Face has no model {repo}, or it is private; check the spelling, or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision {revision!r}; name a branch, a tag or a commit it has") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo} is no Hugging Face id: {error}") from error


@contextmanager
def _asking(repo: str, revision: str) -> Iterator[None]:
    """While the block runs, turn every failure into a ConfigError or FetchError."""
    try:
        with hub_errors(repo, revision):
            yield
    except ConfigError:
        raise
    except Exception as error:  # whatever its network library raises, which differs between releases
        raise FetchError(
            f"the headers of {repo} could not be read ({type(error).__name__}: {error}); check the network, the proxy "
            "and HF_HUB_OFFLINE, or download the model and name its folder"
        ) from error


def hub_config(repo: str, revision: str) -> dict[str, Any]:
    """The config.json of a repository; that file alone is downloaded."""
    from huggingface_hub import hf_hub_download

    with _asking(repo, revision):
        file = hf_hub_download(repo, "config.json", revision=revision)
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"config.json of {repo} is not a JSON object")
    return found


def hub_headers(repo: str, revision: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor, from the first bytes of the repository's safetensors files."""
    from huggingface_hub import HfApi

    with _asking(repo, revision):
        found = HfApi().get_safetensors_metadata(repo, revision=revision)
    return {
        name: (tuple(tensor.shape), str(tensor.dtype))
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
