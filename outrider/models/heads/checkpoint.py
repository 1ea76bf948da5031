"""Reads the checkpoints of drafting heads: what kind of head they hold, for which target, and its weights.

Layouts: EAGLE-1, EAGLE-3, `speculators` (eagle, eagle3, dflash, dspark), DFlash, JetSpec, DSpark, Medusa, and the MTP
modules of whole models (`mtp_layout`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig
from outrider.models.families import read_activation, read_rope
from outrider.models.fields import FieldError, UnsupportedModel, read_bool, read_dict, read_float, read_int
from outrider.models.heads.config import HeadConfig, HeadKind
from outrider.models.heads.files import HeadFiles, open_head
from outrider.models.heads.mtp_layout import MtpLayout

__all__ = ["HeadFiles", "check_target", "kind_of", "load_weights", "open_head", "parse_head_config", "read_head_config"]

_SPECULATORS: dict[str, HeadKind] = {"eagle": "eagle", "eagle3": "eagle3", "dflash": "block", "dspark": "block"}
_MEDUSA = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_UNREAD = ("embed_tokens.weight", "lm_head.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that a head may leave unread: the target has them, or they follow from others."""


def kind_of(files: HeadFiles) -> HeadKind:
    """What kind of head this is, by its configuration and the names of its tensors. ConfigError where it is none."""
    if files.mtp is not None:
        return "mtp"
    named = files.config_json.get("speculators_model_type")
    if named is not None:
        if not isinstance(named, str) or named not in _SPECULATORS:
            raise ConfigError(f"{files.folder}: no drafter here reads {named!r} heads; it reads {_readable()}")
        return _SPECULATORS[named]
    if files.has(r"candidate_selector\..*"):
        raise ConfigError(f"{files.folder} is a DFlash 2 head, which no drafter here reads; it reads {_readable()}")
    if files.has(_MEDUSA.pattern):
        return "medusa"
    if files.has(r"layers\.0\.hidden_norm\.weight"):
        return "eagle3"
    if files.has(r"hidden_norm\.weight") and files.has(r"fc\.weight"):
        return "block"
    if files.has(r"fc\.weight") and files.has(r"layers\.0\.mlp\.gate_proj\.weight"):
        return "eagle"
    raise ConfigError(
        f"{files.folder} holds no drafting head by the names of its tensors; a head is one of {_readable()}, and a "
        "whole model drafts with draft-model:model=NAME"
    )


def _readable() -> str:
    return "EAGLE, EAGLE-3, DFlash, DSpark, Medusa, MTP"


def parse_head_config(files: HeadFiles) -> HeadConfig:
    """The head's configuration as far as the checkpoint states it. `check_target` completes it."""
    kind = kind_of(files)
    try:
        if kind == "medusa":
            return _parse_medusa(files)
        return _parse_layers(files, kind) if files.mtp is None else _parse_mtp(files, files.mtp)
    except (FieldError, UnsupportedModel) as fault:
        raise ConfigError(f"{files.folder / 'config.json'}: {fault}; mend it, or download the head again") from fault


def read_head_config(name: str) -> HeadConfig | None:
    """As `parse_head_config`, by name; None where the checkpoint holds no head, or only the MTP module of a model.

    No weight is read.
    """
    try:
        files = open_head(name)
        kind = kind_of(files)
    except ConfigError:
        return None
    return None if kind == "mtp" else parse_head_config(files)


def _parse_layers(files: HeadFiles, kind: HeadKind) -> HeadConfig:
    """A head of layers that attend: every kind but Medusa."""
    given, shapes = files.config_json, files.shapes
    values = given | read_dict(given, "transformer_layer_config")
    hidden, heads = read_int(values, "hidden_size"), read_int(values, "num_attention_heads")
    vocab, drafted = read_int(values, "vocab_size"), given.get("draft_vocab_size") or 0
    if "d2t" not in shapes and drafted not in (0, vocab):
        raise UnsupportedModel(f"draft_vocab_size is {drafted} of {vocab} tokens, and there is no tensor d2t")
    fc = shapes.get("fc.weight", (0, 0))
    wide = read_int({"target_hidden_size": hidden} | _given(given), "target_hidden_size")
    config = HeadConfig(
        kind=kind,
        vocab_size=vocab,
        hidden_size=hidden,
        target_hidden_size=wide,
        target_layers=read_int(given, "num_target_layers") if given.get("num_target_layers") else 0,
        draft_vocab_size=shapes["d2t"][0] if "d2t" in shapes else 0,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        taps=_taps(given),
        layers=1 + max((int(m[1]) for name in shapes if (m := re.match(r"layers\.(\d+)\.", name))), default=-1),
        heads=heads,
        kv_heads=read_int({"num_key_value_heads": heads} | _given(values), "num_key_value_heads"),
        head_dim=read_int({"head_dim": hidden // heads} | _given(values), "head_dim"),
        intermediate_size=read_int(values, "intermediate_size"),
        norm_eps=read_float({"rms_norm_eps": 1e-6} | _given(values), "rms_norm_eps"),
        rope=read_rope(values),
        max_positions=read_int({"max_position_embeddings": 2048} | _given(values), "max_position_embeddings"),
        activation=read_activation(values),
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        qkv_bias="layers.0.self_attn.q_proj.bias" in shapes,
        out_bias="layers.0.self_attn.o_proj.bias" in shapes,
        window=_window(values),
        bias="fc.bias" in shapes,
    )
    if kind == "mtp":
        return config
    if kind == "block":
        return _with_block(config, files)
    if files.has(r"(embedding_layernorm|pre_lm_head_layernorm|hidden_states_layernorm)\.weight"):
        raise UnsupportedModel("its norms around fc (HASS) are not supported")
    if kind == "eagle3" and fc[1] % wide:
        raise UnsupportedModel(f"fc.weight has {fc[1]} columns, no multiple of the target's hidden size {wide}")
    speculators = "speculators_model_type" in given
    return replace(
        config,
        # by default it is on in checkpoints of `speculators`, and off in EAGLE's own
        norm_before_residual=read_bool({"norm_before_residual": speculators} | _given(given), "norm_before_residual"),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        norm_output=read_bool(given, "norm_output"),
    )


def _with_block(config: HeadConfig, files: HeadFiles) -> HeadConfig:
    """Adds what only block heads have."""
    nested, shapes = read_dict(files.config_json, "dflash_config"), files.shapes
    given = files.config_json | nested
    markov, kind = shapes.get("markov_head.markov_w1.weight", (0, 0))[1], given.get("markov_head_type", "vanilla")
    if markov and kind != "vanilla":
        raise UnsupportedModel(f"markov_head_type {kind!r}; vanilla is supported")
    if given.get("projector_type", "dflash") != "dflash":
        raise UnsupportedModel(f"projector_type {given['projector_type']!r}; dflash is supported")
    mask = given.get("mask_token_id", 0)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
        raise FieldError("mask_token_id", f"a token from 0 to {config.vocab_size - 1}", mask)
    # DSpark's own layout says nothing of its anchor, which always predicts; `speculators` says so where it does
    speculators = "speculators_model_type" in files.config_json
    anchored = {"sample_from_anchor": bool(markov) and not speculators} | _given(given)
    windowed = config.window > 0 and speculators and not read_bool(given, "sliding_window_non_causal")
    return replace(
        config,
        block_size=read_int(given, "block_size", 64),
        mask_token_id=mask,
        own_mask="mask_embedding" in shapes,
        markov_rank=markov,
        confidence=files.has(r"confidence_head\.proj\.weight"),
        confidence_with_markov=shapes.get("confidence_head.proj.weight", (1, 0))[1] > config.hidden_size,
        sample_from_anchor=read_bool(anchored, "sample_from_anchor"),
        causal=windowed or read_bool({"causal_head": False} | _given(given), "causal_head"),
    )


def _parse_mtp(files: HeadFiles, layout: MtpLayout) -> HeadConfig:
    """A module of an ordinary layer. Its config.json is that of the model it belongs to."""
    given, shapes = files.config_json, files.shapes
    given = given | read_dict(given, "text_config")
    queries = shapes.get("layers.0.self_attn.q_proj.weight", (0,))[0]
    heads = read_int(given, "num_attention_heads")
    dim = read_int({"head_dim": read_int(given, "hidden_size") // heads} | _given(given), "head_dim")
    other = None
    if files.has(r"layers\.0\.self_attn\.(q_a|q_b|kv_a|kv_b)_proj.*"):
        other = "multi-head latent attention (MLA)"
    elif files.has(r"layers\.0\.mlp\.(experts|gate|shared_experts?)\..*"):
        other = "a mixture of experts"
    elif queries == 2 * heads * dim:
        other = "gated attention"
    if other is not None:
        raise ConfigError(
            f"{files.folder}: the layer of its MTP module has {other}, and mtp runs layers of plain attention and one "
            "MLP; choose another drafter, for example suffix"
        )
    config = _parse_layers(replace(files, config_json=given), "mtp")
    number = re.fullmatch(r"model\.layers\.(\d+)\..*", files.places["fc.weight"][1])
    return replace(
        config,
        target_layers=int(number[1]) if number else 0,  # modules are numbered after the target's layers
        own_embedding=False,  # what DeepSeek-V3 stores are copies of the target's
        own_head=False,
        hidden_first=layout.hidden_first,
        # FastMTP, whose configuration has this key, trains MiMo's module anew on what the target's head reads
        raw_hidden=layout.raw_hidden and "num_speculative_steps" not in given,
        unit_offset=str(given.get("model_type")).startswith(("qwen3_next", "qwen3_5")),
    )


def _parse_medusa(files: HeadFiles) -> HeadConfig:
    """Medusa's config.json says almost nothing: sizes are those of its tensors."""
    found = [_MEDUSA.fullmatch(name) for name in files.shapes]
    places = [(int(m[1]), int(m[2])) for m in found if m]
    heads, layers = (1 + max(numbers) for numbers in zip(*places, strict=True))
    hidden, outputs = files.shapes["0.0.linear.weight"][0], files.shapes.get(f"0.{layers}.weight", (0,))[0]
    return HeadConfig(
        kind="medusa",
        vocab_size=outputs,
        hidden_size=hidden,
        target_hidden_size=hidden,
        layers=0,
        own_head=outputs > 0,
        medusa_heads=heads,
        medusa_layers=layers,
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not null."""
    return {key: value for key, value in values.items() if value is not None}


def _taps(given: dict[str, Any]) -> tuple[int, ...]:
    """The layers whose outputs are read; empty where the configuration does not say.

    EAGLE-3 and `speculators` number the inputs of layers, so that layer i's output is i + 1; DFlash numbers outputs.
    """
    outputs = (given | read_dict(given, "dflash_config")).get("target_layer_ids")
    entering = (given | read_dict(given, "eagle_config")).get("eagle_aux_hidden_state_layer_ids")
    entering = entering or given.get("aux_hidden_state_layer_ids")
    ids: Any = outputs or entering or []
    first = 0 if outputs else 1
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= first for i in ids):
        raise FieldError("the target's layer ids", f"whole numbers from {first} on", ids)
    return tuple(i - first for i in ids)


def _window(values: Mapping[str, Any]) -> int:
    """The one window of all its layers; 0: none."""
    types = values.get("layer_types") or []
    windowed = set(types) == {"sliding_attention"} if types else values.get("use_sliding_window") is True
    if types and not windowed and "sliding_attention" in types:
        raise UnsupportedModel("only some of its layers have a window; all or none must")
    return read_int(values, "sliding_window") if windowed and values.get("sliding_window") else 0


def check_target(config: HeadConfig, target: DecoderConfig, *, name: str, kinds: Seq[HeadKind]) -> HeadConfig:
    """The configuration, completed with the layers it reads of this target. ConfigError if it is for another target.

    name: of the head, for errors. kinds: those that the caller drafts with.
    """
    if config.kind not in kinds:
        asked = f"not of kind {' or '.join(kinds)}"
        drafter = "eagle" if config.kind == "eagle3" else config.kind
        raise ConfigError(f"{name} is a head of kind {config.kind}, {asked}; use {drafter}:model={name}")
    layers = len(target.layers)
    for what, made_for, has in (
        ("a vocabulary of {} tokens", config.vocab_size, target.vocab_size),
        ("a hidden size of {}", config.target_hidden_size, target.hidden_size),
        ("{} layers", config.target_layers, layers),
    ):
        if made_for not in (0, has):
            raise ConfigError(
                f"{name} was made for a target with {what.format(made_for)}, and this one has {has}: it belongs to "
                "another model; name the model it was trained for, or a head trained for this one"
            )
    taps = config.taps or _default_taps(config.kind, layers)
    if not taps or not all(0 <= tap < layers for tap in taps):
        raise ConfigError(f"{name} reads layers {taps} of its target, and this one has layers 0 to {layers - 1}")
    return replace(config, taps=taps, vocab_size=target.vocab_size, target_layers=layers)


def _default_taps(kind: HeadKind, layers: int) -> tuple[int, ...]:
    """The layers, of `layers`, that a kind of head reads where its checkpoint does not say."""
    return (1, layers // 2 - 1, layers - 4) if kind == "eagle3" else (layers - 1,)


def check_weights(head: nn.Module, files: HeadFiles) -> None:
    """ConfigError where the checkpoint lacks a tensor of the head, has one too many, or one of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    faults = [f"{name} is missing" for name in sorted(expected.keys() - files.shapes.keys())]
    surplus = files.shapes.keys() - expected.keys() - set(_UNREAD)
    faults += [f"{name} has no place in the head" for name in sorted(surplus)]
    for name in sorted(expected.keys() & files.shapes.keys()):
        if files.shapes[name] != expected[name]:
            faults.append(f"{name} has shape {files.shapes[name]}, not {expected[name]}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ConfigError(
            f"the weights in {files.folder} do not fit its config.json: {'; '.join(faults[:5])}{more}; download the "
            "head again"
        )


def load_weights(head: nn.Module, files: HeadFiles) -> None:
    """Fill all parameters and buffers of a head. ConfigError as for `check_weights`."""
    check_weights(head, files)
    with torch.no_grad():
        for name, tensor in head.state_dict().items():
            stored = files.read(name)
            if stored.is_floating_point() != tensor.is_floating_point():
                raise ConfigError(f"{files.folder}: {name} is stored as {stored.dtype}, which it cannot be")
            tensor.copy_(stored)
