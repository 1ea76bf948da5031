"""Checks a draft model against its target: tensors, vocabulary, context and RoPE, size, how it runs, licence."""

from __future__ import annotations

import torch

from outrider.check.findings import Finding
from outrider.check.sides import Side, is_restricted, licence_of
from outrider.check.text import check_pipelines, check_templates
from outrider.check.vocabulary import Vocabulary, check_vocabularies
from outrider.checkpoints.tensors import open_tensors
from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig
from outrider.models.load import check_tensors
from outrider.plan.facts import ModelFacts

CPU = torch.device("cpu")
AGAIN = "download or save the draft again"
MAX_SHARE = 0.5
"""The share of the target's parameters from which on a draft hardly pays."""
SMALLER = "take a draft of a tenth of the target's size, or less"


def check_model(target: Side, draft: Side) -> tuple[list[Finding], int]:
    """All findings that need no run, and the context that the pair needs; 0: the target's own."""
    found = [*_weights(draft), *_way(draft)]
    words = check_vocabularies(Vocabulary(target.tokenizer, target.rows), Vocabulary(draft.tokenizer, draft.rows))
    found += words
    if not any(each.level in ("cross", "refuse") for each in words):
        found += check_pipelines(target.tokenizer, draft.tokenizer)
    found += check_templates(target.tokenizer, draft.tokenizer)
    limits, context = _context(target, draft)
    found += [*limits, *_rope(target, draft), *_size(target, draft), *_dtype(target, draft)]
    return [*found, *check_licences(target.facts, draft.facts)], context


def _weights(draft: Side) -> list[Finding]:
    """Check that the draft's tensors are those that its configuration describes, and hold no NaN or infinity."""
    if draft.config is None:
        return []
    with open_tensors(draft.folder) as tensors:
        try:
            check_tensors(draft.config, tensors, draft.folder)
        except ConfigError as error:
            return [Finding("weights", "refuse", str(error), "it cannot be loaded", AGAIN)]
        # only norms and biases are read, which is fast; an overflow anywhere in training reaches them
        small = (name for name, tensor in draft.facts.tensors.items() if len(tensor.shape) == 1)
        broken = [name for name in small if not tensors.read(name, CPU, torch.float32).isfinite().all()]
    if broken:
        what = f"{len(broken)} tensors hold NaN or infinity, {broken[0]} first"
        return [Finding("weights", "refuse", what, "it drafts nothing that makes sense", AGAIN)]
    return [Finding("weights", "ok", f"{draft.facts.parameters:,} parameters, all where config.json wants them")]


def _way(draft: Side) -> list[Finding]:
    """Check how the draft runs: natively, or on Transformers' code. Recurrent models are refused."""
    if draft.recurrent:
        return [
            Finding(
                "state",
                "refuse",
                f"{draft.name} keeps a state beside its cache ({draft.facts.config_json.get('model_type')})",
                "rejected tokens cannot be taken back from it",
                "choose a draft that attends in every layer",
            )
        ]
    if draft.config is not None:
        return []
    quantized = draft.facts.config_json.get("quantization_config")
    why = "is quantised (quantization_config)" if quantized else "is of no family that runs natively"
    return [
        Finding(
            "fallback",
            "caution",
            f"the draft {why}, and runs on Transformers' code",
            "one sequence at a time and slower: drafts may cost more than they save",
            "take an unquantised draft, or a GGUF file of it" if quantized else "take a draft of a native family",
        )
    ]


def _context(target: Side, draft: Side) -> tuple[list[Finding], int]:
    if not draft.context or not target.context or draft.context >= target.context:
        return [Finding("context", "ok", f"the draft reads {draft.context:,} tokens, the target {target.context:,}")], 0
    return [
        Finding(
            "context",
            "option",
            f"the draft was made for {draft.context:,} tokens and the target for {target.context:,}",
            "the engine refuses the pair: beyond its context the draft would guess blindly",
            f"serve with --context {draft.context}, or take a draft with a longer context",
        )
    ], draft.context


def _rope(target: Side, draft: Side) -> list[Finding]:
    """Caution where the target was trained on positions that the draft only reaches by stretching its RoPE."""
    if target.config is None or draft.config is None:
        return []
    trained = [_trained_positions(side.config) for side in (target, draft) if side.config is not None]
    if trained[1] >= trained[0] or trained[1] >= target.context:
        return []
    return [
        Finding(
            "rope",
            "caution",
            f"the draft's positions are trained up to {trained[1]:,} and stretched beyond (RoPE "
            f"{draft.config.ropes[0].kind}); the target's up to {trained[0]:,}",
            "in longer texts fewer of its drafts are accepted",
            f"serve with --context {trained[1]} where texts are short, or take a draft trained on long texts",
        )
    ]


def _trained_positions(config: DecoderConfig) -> int:
    originals = [rope.original_positions for rope in config.ropes if rope.original_positions]
    factors = [config.max_positions // round(rope.factor) for rope in config.ropes if rope.factor > 1]
    return min([*originals, *(factors if not originals else []), config.max_positions])


def _size(target: Side, draft: Side) -> list[Finding]:
    if draft.folder == target.folder:
        return [_no_gain("the draft is the target itself", target)]
    share = draft.facts.parameters / max(1, target.facts.parameters)
    what = f"the draft has {100 * share:.0f} % of the target's parameters"
    if share < MAX_SHARE:
        return [Finding("size", "ok", what)]
    if share >= 1 and draft.facts.size >= target.facts.size:  # a draft in fewer bits may still be faster
        return [_no_gain(what, target)]
    costs = "a draft token costs about as much as one of the target: little or nothing is saved"
    return [Finding("size", "caution", what, costs, SMALLER)]


def _no_gain(what: str, target: Side) -> Finding:
    """A draft that cannot gain. The level is caution, since the pair works."""
    costs = "each draft token takes as long as one of the target: nothing can be saved"
    fix = f"{SMALLER}; `outrider advise {target.name}` measures the drafters that need no model"
    return Finding("size", "caution", what, costs, fix)


def _dtype(target: Side, draft: Side) -> list[Finding]:
    if target.config is None or draft.config is None or target.config.dtype == draft.config.dtype:
        return []
    names = [str(config.dtype).removeprefix("torch.") for config in (target.config, draft.config)]
    what = f"stored in {names[0]} (target) and {names[1]} (draft); on CUDA each runs in its own"
    return [Finding("dtype", "note", what)]


def check_licences(target: ModelFacts, draft: ModelFacts) -> list[Finding]:
    """Compare the licences that the files of both models name; no finding where they name too little."""
    ours, theirs = licence_of(target), licence_of(draft)
    if not theirs or ours == theirs:
        return [Finding("licence", "ok", f"both name the licence {ours}")] if ours and theirs else []
    level = "caution" if is_restricted(theirs) and not is_restricted(ours) else "note"
    return [
        Finding(
            "licence",
            level,
            f"the draft's licence is {theirs}, the target's {ours or 'not named'}",
            "whoever serves the pair is bound by both",
            "read the draft's licence before serving it",
        )
    ]
