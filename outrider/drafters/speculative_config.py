"""Reads vLLM's `--speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.models.heads.checkpoint import kind_of
from outrider.models.heads.files import open_head

_COMMON = ("method", "num_speculative_tokens")
_OF_MODEL = (*_COMMON, "model", "revision", "draft_tensor_parallel_size")
_KEYS = {
    "ngram": (*_COMMON, "model", "prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        *_COMMON,
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": _OF_MODEL,
    "eagle": _OF_MODEL,
    "eagle3": _OF_MODEL,
    "medusa": _OF_MODEL,
    "mtp": _OF_MODEL,
    "dflash": _OF_MODEL,
    "dspark": _OF_MODEL,
}
_MTP_NAMES = ("deepseek_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's older names of method mtp, one for each kind of model."""
_HEAD_NAMES = ("eagle3", "eagle-", "dflash", "dspark")
"""Parts of names by which vLLM knows heads; each is a method, with "-" or without."""
_NGRAM_MODELS = ("ngram", "[ngram]")
"""Model names that stand for no model: vLLM's older way to ask for method ngram."""


def from_vllm(config: str | Mapping[str, Any]) -> DrafterConfig:
    """The drafter a vLLM speculative configuration asks for, with vLLM's defaults for what it leaves out.

    Accepts the methods in `_KEYS`. A key that has no counterpart is an error, never ignored; null is the same as
    leaving a key out.
    """
    given = {key: value for key, value in _as_mapping(config).items() if value is not None}
    method = _method(given)
    for key in given:
        if key not in _KEYS[method]:
            raise ConfigError(
                f"speculative config: {key!r} cannot be honoured with method {method}; "
                f"leave it out, or use: {', '.join(_KEYS[method])}"
            )
    if _whole(given, "draft_tensor_parallel_size", 1) != 1:
        raise ConfigError("speculative config: draft_tensor_parallel_size must be 1: a draft runs on one device")
    return _READERS[method](given)


def _as_mapping(config: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            near = error.doc[max(0, error.pos - 12) : error.pos + 12]
            raise ConfigError(
                f"speculative config is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, "
                f'near {near!r}; for example {{"method": "ngram", "num_speculative_tokens": 5}}'
            ) from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative config must be a JSON object, got {type(config).__name__}")
    return config


def _method(given: Mapping[str, Any]) -> str:
    model = given.get("model")
    if "method" not in given:
        if model is None:
            raise ConfigError(f"speculative config names neither method nor model; methods: {', '.join(_KEYS)}")
        if model in _NGRAM_MODELS:
            return "ngram"
        return _method_of(model) or "draft_model"
    method = "mtp" if given["method"] in _MTP_NAMES else given["method"]
    if not isinstance(method, str) or method not in _KEYS:
        raise ConfigError(f"speculative config: no method {method!r} here; methods: {', '.join(_KEYS)}")
    return method


def _whole(given: Mapping[str, Any], key: str, default: int) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"speculative config: {key} must be a whole number, got {value!r}")
    return value


def _tokens(given: Mapping[str, Any]) -> int:
    if "num_speculative_tokens" not in given:
        raise ConfigError("speculative config needs num_speculative_tokens, for example 5")
    return _whole(given, "num_speculative_tokens", 0)


def _ngram(given: Mapping[str, Any]) -> DrafterConfig:
    if given.get("model", "ngram") not in _NGRAM_MODELS:
        raise ConfigError("speculative config: 'model' cannot be honoured with method ngram; leave it out")
    longest = _whole(given, "prompt_lookup_max", _whole(given, "prompt_lookup_min", 5))
    shortest = _whole(given, "prompt_lookup_min", longest)
    return PromptLookupConfig(k=_tokens(given), max_match=longest, min_match=shortest, min_prob=0)


def _suffix(given: Mapping[str, Any]) -> DrafterConfig:
    depth = _whole(given, "suffix_decoding_max_tree_depth", 24)
    return SuffixConfig(
        k=_whole(given, "num_speculative_tokens", depth),
        max_depth=depth,
        cached_requests=_whole(given, "suffix_decoding_max_cached_requests", 10_000),
        factor=given.get("suffix_decoding_max_spec_factor", 1.0),
        min_prob=given.get("suffix_decoding_min_token_prob", 0.1),
    )


def _model(given: Mapping[str, Any], what: str) -> str:
    """The name of the model that drafts, or of the head."""
    model, revision = given.get("model"), given.get("revision", "")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"speculative config: method {given.get('method', 'draft_model')} needs model, {what}")
    if not isinstance(revision, str):
        raise ConfigError(f"speculative config: revision must be a branch, tag or commit, got {revision!r}")
    return f"{model}@{revision}" if revision else model


def _head(given: Mapping[str, Any]) -> str:
    return _model(given, "the folder or Hugging Face id of the head")


def _method_of(model: object) -> str | None:
    """The method of a head given without one: by a folder's files, else by the name, as in vLLM. None: no head."""
    if not isinstance(model, str):
        return None
    if Path(model).expanduser().is_dir():
        try:
            kind = kind_of(open_head(model))
            return "dflash" if kind == "block" else kind
        except ConfigError:  # no head; loading says what is wrong with it
            return None
    return next((part.rstrip("-") for part in _HEAD_NAMES if part in model.lower()), None)


def _draft_model(given: Mapping[str, Any]) -> DrafterConfig:
    model, k = _model(given, "the name of a smaller model"), _tokens(given)
    if (method := _method_of(given["model"])) not in (None, "mtp"):  # with an MTP module it is a whole model, no head
        raise ConfigError(f"speculative config: {model} is a drafting head; its method is {method}")
    from outrider.drafters.draft_model import DraftModelConfig

    return DraftModelConfig(model=model, k=k)


def _eagle(given: Mapping[str, Any]) -> DrafterConfig:
    from outrider.drafters.eagle import EagleConfig

    kind = "eagle3" if _method(given) == "eagle3" else "eagle"
    return EagleConfig(model=_head(given), k=_tokens(given), kind=kind)


def _medusa(given: Mapping[str, Any]) -> DrafterConfig:
    from outrider.drafters.medusa import MedusaConfig

    return MedusaConfig(model=_head(given), k=_tokens(given), tree=0)


def _block(given: Mapping[str, Any]) -> DrafterConfig:
    from outrider.drafters.block import BlockConfig

    return BlockConfig(model=_head(given), k=_tokens(given))


def _mtp(given: Mapping[str, Any]) -> DrafterConfig:
    """Without a model: the target's own module."""
    from outrider.drafters.mtp import MtpConfig

    if "model" not in given and "revision" in given:
        raise ConfigError("speculative config: revision is that of model, which is not given; leave it out")
    return MtpConfig(model=_head(given) if "model" in given else "", k=_tokens(given))


_READERS: dict[str, Callable[[Mapping[str, Any]], DrafterConfig]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle,
    "medusa": _medusa,
    "mtp": _mtp,
    "dflash": _block,
    "dspark": _block,
}
