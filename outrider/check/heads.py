"""Checks a drafting head against its target: its kind by name and by content, sizes, tensors and draft vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from outrider.check.findings import Finding
from outrider.check.sides import Side
from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder, Norm, Weights
from outrider.models.heads.block import BlockHead
from outrider.models.heads.checkpoint import HeadFiles, check_target, check_weights, kind_of, parse_head_config
from outrider.models.heads.config import HeadConfig, HeadKind
from outrider.models.heads.eagle import make_eagle
from outrider.models.heads.medusa import MedusaHead
from outrider.models.heads.mtp import MtpHead
from outrider.models.heads.save import IDENTITY
from outrider.models.identity import identify
from outrider.models.linear import Linear

NAMES: tuple[tuple[str, HeadKind], ...] = (
    ("eagle-?3", "eagle3"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("dflash|dspark", "block"),
)
"""Patterns of the names in a configuration, with the kind of head that each means; the first match counts."""
ANOTHER = "name the target it was trained for, or a head trained for this one (`outrider train`)"


@dataclass(frozen=True, slots=True)
class HeadSide:
    """A head's checkpoint, opened."""

    name: str
    files: HeadFiles
    held: HeadKind
    """The kind of head, by its tensors."""

    @property
    def drafter(self) -> str:
        """The drafter that runs it."""
        return "eagle" if self.held == "eagle3" else self.held


def open_head_side(name: str, files: HeadFiles) -> HeadSide | None:
    """The head in a checkpoint, with its kind by its tensors alone; None where the checkpoint holds none."""
    bare = {key: value for key, value in files.config_json.items() if key != "speculators_model_type"}
    try:
        return HeadSide(name, files, kind_of(replace(files, config_json=bare)))
    except ConfigError:
        return None


def check_head(target: Side, head: HeadSide) -> list[Finding]:
    """All findings about a target and a head that need no run."""
    if target.config is None:
        return [
            Finding(
                "target-family",
                "refuse",
                f"{target.name} runs on Transformers' code, which hands out no hidden states",
                "heads draft for native models only",
                "use a draft model, or suffix",
            )
        ]
    found = _kind(head)
    if any(each.level == "refuse" for each in found):
        return found
    try:
        config = parse_head_config(head.files)
    except ConfigError as error:
        return [*found, Finding("head-config", "refuse", str(error), "it cannot be loaded", "download the head again")]
    sizes = _sizes(head, config, target.config)
    found += sizes
    if any(each.level == "refuse" for each in sizes):
        return found
    config = check_target(config, target.config, name=head.name, kinds=(config.kind,))
    return [*found, *_tensors(head, config, target.config), *_draft_vocabulary(head, config), *_made_for(head, target)]


def _named_kind(head: HeadSide) -> tuple[str, HeadKind] | None:
    """The name that the head's configuration gives it, and the kind which that means; None without a known name."""
    given = head.files.config_json
    for words in (given.get("speculators_model_type"), *(given.get("architectures") or ())):
        for pattern, kind in NAMES:
            if isinstance(words, str) and re.search(pattern, words.lower()):
                return words, kind
    return None


def _kind(head: HeadSide) -> list[Finding]:
    named = _named_kind(head)
    if named is None or named[1] == head.held or head.held == "mtp":
        return [Finding("head-kind", "ok", f"a head of kind {head.held}, by its tensors")]
    by_speculators = "speculators_model_type" in head.files.config_json
    return [
        Finding(
            "head-kind",
            "refuse" if by_speculators else "caution",
            f"config.json names it {named[0]!r} ({named[1]}), and its tensors are those of a head of kind {head.held}",
            "it cannot be loaded as what it is named" if by_speculators else "other engines go by the name, and fail",
            f"correct config.json to {head.held}, or download the head again",
        )
    ]


def _sizes(head: HeadSide, config: HeadConfig, target: DecoderConfig) -> list[Finding]:
    layers = len(target.layers)
    compared = (
        ("head-vocabulary", "a vocabulary of {:,} tokens", config.vocab_size, target.vocab_size),
        ("head-hidden", "a hidden size of {:,}", config.target_hidden_size, target.hidden_size),
        ("head-layers", "{:,} layers", config.target_layers, layers),
    )
    found = [
        Finding(
            code,
            "refuse",
            f"{head.name} was made for a target with {what.format(made)}, and this one has {has:,}",
            "it belongs to another model: nothing it reads means what it was trained on",
            ANOTHER,
        )
        for code, what, made, has in compared
        if made not in (0, has)
    ]
    if found:
        return found
    try:
        check_target(config, target, name=head.name, kinds=(config.kind,))
    except ConfigError as error:
        what = "it reads layers that the target has not"
        return [Finding("head-taps", "refuse", str(error), what, ANOTHER)]
    return [Finding("head-sizes", "ok", "vocabulary, hidden size and layers are the target's")]


def _meta_decoder(config: DecoderConfig) -> Decoder:
    """A decoder without weights, to build heads on the meta device for the shapes of their tensors."""
    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    norm = Norm(torch.empty(config.hidden_size, device="meta"), config.norm_eps)
    return Decoder(config, Weights(table, [], norm, Linear(table)), torch.float32)


MAKERS: dict[HeadKind, Callable[[HeadConfig, Decoder], nn.Module]] = {
    "eagle": make_eagle,
    "eagle3": make_eagle,
    "block": BlockHead,
    "medusa": MedusaHead,
    "mtp": MtpHead,
}


def _tensors(head: HeadSide, config: HeadConfig, target: DecoderConfig) -> list[Finding]:
    """Check that the checkpoint holds the tensors that a head of this configuration needs."""
    if config.kind == "eagle":
        config = replace(config, own_head=False)  # some checkpoints store a copy of the target's output head
    decoder = _meta_decoder(target)
    try:
        with torch.device("meta"):
            check_weights(MAKERS[config.kind](config, decoder), head.files)
    except ConfigError as error:
        return [Finding("weights", "refuse", str(error), "it cannot be loaded", "download the head again")]
    return [Finding("weights", "ok", f"{head.files.numbers:,} parameters, all where config.json wants them")]


def _draft_vocabulary(head: HeadSide, config: HeadConfig) -> list[Finding]:
    """Check a reduced vocabulary, if there is one: each column must be another token of the target."""
    if not config.draft_vocab_size:
        return []
    offsets = head.files.read("d2t").long()
    tokens = torch.arange(len(offsets)) + offsets
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        what = f"d2t names tokens {int(tokens.min())} to {int(tokens.max())}, and the target has {config.vocab_size:,}"
    elif len(tokens.unique()) < len(tokens):
        what = f"d2t gives {len(tokens) - len(tokens.unique()):,} of its columns a token that another has"
    else:
        return [Finding("draft-vocabulary", "ok", f"it drafts {len(tokens):,} tokens of the target's vocabulary")]
    fix = "download the head again, or train one for this target"
    return [Finding("draft-vocabulary", "refuse", what, "it would draft other words than it means", fix)]


def _made_for(head: HeadSide, target: Side) -> list[Finding]:
    """Compare the target with the model that the head's configuration identifies or names."""
    given = head.files.config_json
    identity = given.get(IDENTITY)
    if isinstance(identity, dict):
        if identity == identify(target.folder).as_json():
            return [Finding("made-for", "ok", "it was trained on these very weights")]
        what = "it was trained on a model with other weights than this target's"
        means = "for a fine-tuned relative some drafts are accepted, for a stranger none"
        return [Finding("made-for", "caution", what, means, "see its acceptance, or train a head for this target")]
    config = given.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(named, str) or Path(named).name == Path(target.name).name:
        return []
    return [Finding("made-for", "note", f"its configuration names the target {named!r}, here it is {target.name!r}")]
