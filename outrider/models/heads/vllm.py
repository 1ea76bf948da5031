"""Heads as vLLM reads them: with the tensors that it does not take from the target.

vLLM's classes want the rows of the output head of a reduced vocabulary in the checkpoint, and take the embedding of a
block's mask from the vocabulary's own rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoints.folder import weight_files
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.storage import outrider_home
from outrider.checkpoints.tensors import Tensors, open_tensors
from outrider.core.errors import ConfigError
from outrider.models.heads.checkpoint import kind_of, parse_head_config
from outrider.models.heads.files import HeadFiles, open_head
from outrider.models.heads.save import write_folder

MAX_FILE_BYTES = 1 << 40
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
_HEADS = ("lm_head.weight", *_EMBEDDINGS)
"""Names of the output head: a tied one is the embedding."""


def head_for_vllm(head: str, target: str) -> Path:
    """The folder of the head as vLLM reads it: its own where no tensor is missing, else a copy in the cache, made once.

    ConfigError where the target's embedding or output head is not named as in Llama-like models.
    """
    files = open_head(head)
    lacking = _lacking(files)
    if not lacking:
        return files.folder
    model = resolve(target)
    copy = outrider_home() / "vllm" / f"{files.folder.name}-{_key(files.folder, model)}"
    if not copy.is_dir():
        write_folder(copy, files.config_json, _completed(files, model, lacking), MAX_FILE_BYTES)
    return copy


def _lacking(files: HeadFiles) -> set[str]:
    """The tensors that vLLM needs and the checkpoint lacks, of `lm_head.weight` and `embed_tokens.weight`."""
    lacking: set[str] = set()
    if "d2t" in files.shapes and "lm_head.weight" not in files.shapes:
        lacking.add("lm_head.weight")
    if kind_of(files) == "block" and "mask_embedding" in files.shapes:
        lacking.add("embed_tokens.weight")
    return lacking


def _completed(files: HeadFiles, model: Path, lacking: set[str]) -> dict[str, Tensor]:
    tensors = {name: files.read(name) for name in files.shapes}
    with open_tensors(model) as of_target:
        if "lm_head.weight" in lacking:
            d2t = tensors["d2t"]
            rows = _read(of_target, _HEADS, model)  # [vocabulary, hidden]
            tensors["lm_head.weight"] = rows[torch.arange(len(d2t)) + d2t].contiguous()
        if "embed_tokens.weight" in lacking:
            embedding = _read(of_target, _EMBEDDINGS, model)
            embedding[parse_head_config(files).mask_token_id] = tensors.pop("mask_embedding")
            tensors["embed_tokens.weight"] = embedding
    return tensors


def _read(tensors: Tensors, names: tuple[str, ...], model: Path) -> Tensor:
    """A copy of the first of these tensors that exists, as it is stored."""
    found = next((name for name in names if name in tensors.names()), None)
    if found is None:
        raise ConfigError(f"{model} has no tensor {' or '.join(names)}, which vLLM wants of this head's target")
    return tensors.read(found, torch.device("cpu"), tensors.dtype(found)).clone()


def _key(head: Path, model: Path) -> str:
    """A key that changes with the weight files of the head or of the target."""
    digest = hashlib.sha256()
    for folder in (head, model):
        for file in sorted(weight_files(folder)):
            told = file.stat()
            digest.update(f"{file}:{told.st_size}:{told.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]
