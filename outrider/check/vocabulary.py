"""Compares two vocabularies token by token: ids, padding, special tokens; and how much two different ones share."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.check.findings import Finding
from outrider.core.errors import ConfigError
from outrider.drafters.cross_model import MIN_SHARED
from outrider.models.tokenizer import Tokenizer, check_same_vocabulary
from outrider.models.vocab_map import VocabMap

SHOWN = 3
SAME_FAMILY = "take a smaller model of the target's family"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and the width of its model's logits."""

    tokenizer: Tokenizer
    rows: int


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> list[Finding]:
    """Findings on what differs. Where ids or special tokens do, one more: whether cross-model can map between them."""
    # where ids differ, so may those of special tokens: cross-model matches these by name
    found = _ids(target, draft) or _special(target.tokenizer, draft.tokenizer) or _refused(target, draft)
    if found:
        return [*found, _mapping(target, draft)]
    same = sum(token is not None for token in target.tokenizer.tokens[: target.rows])
    return [
        Finding("token-ids", "ok", f"all {same:,} tokens of the target have the same ids"),
        *_lengths(target, draft),
    ]


def _ids(target: Vocabulary, draft: Vocabulary) -> list[Finding]:
    theirs = draft.tokenizer.tokens
    own = list(enumerate(target.tokenizer.tokens[: target.rows]))
    other = [(i, token) for i, token in own if i < len(theirs) and token != theirs[i]]
    found: list[Finding] = []
    if other:
        shown = "; ".join(
            f"{i} is {token!r} to the target and {theirs[i]!r} to the draft" for i, token in other[:SHOWN]
        )
        found.append(
            Finding(
                "token-ids",
                "cross",
                f"{len(other):,} of {len(own):,} ids stand for other tokens: {shown}",
                "as a draft model it would read and draft other words than the target means; every draft is rejected",
                f"{SAME_FAMILY}, or let cross-model map between the vocabularies",
            )
        )
    missing = [token for i, token in own if i >= draft.rows and token is not None]
    if missing:
        found.append(
            Finding(
                "rows",
                "cross",
                f"{len(missing):,} tokens of the target, as {missing[0]!r}, lie beyond the draft's {draft.rows:,} rows",
                "it cannot read a text that holds them",
                f"{SAME_FAMILY}, or let cross-model map between the vocabularies",
            )
        )
    return found


def _special(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    found: list[Finding] = []
    if None not in (target.bos_id, draft.bos_id) and target.bos_id != draft.bos_id:
        found.append(
            Finding(
                "bos",
                "cross",
                f"texts begin with {_named(target, target.bos_id)} for the target and "
                f"{_named(draft, draft.bos_id)} for the draft",
                "the draft would read every text from a beginning that it was not trained on",
                "set the same bos_token in the draft's tokenizer_config.json, or use cross-model",
            )
        )
    if target.eos_ids and draft.eos_ids and not target.eos_ids & draft.eos_ids:
        ends = [", ".join(_named(t, i) for i in sorted(t.eos_ids)) for t in (target, draft)]
        found.append(
            Finding(
                "eos",
                "cross",
                f"texts end with {ends[0]} for the target and {ends[1]} for the draft",
                "the draft never proposes the target's end: the last tokens of every answer are drafted in vain",
                "give the draft's generation_config.json the target's eos_token_id, or use cross-model",
            )
        )
    return found


def _named(tokenizer: Tokenizer, token: int | None) -> str:
    return f"{tokenizer.id_to_token(token)!r} ({token})" if token is not None else "none"


def _refused(target: Vocabulary, draft: Vocabulary) -> list[Finding]:
    """A finding where the engine would refuse the draft model although `_ids` and `_special` found nothing."""
    try:
        check_same_vocabulary(target.tokenizer, draft.tokenizer, target.rows, draft.rows)
    except ConfigError as error:
        return [Finding("token-ids", "cross", str(error), "the engine refuses it as a draft model", "use cross-model")]
    return []


def _lengths(target: Vocabulary, draft: Vocabulary) -> list[Finding]:
    """Findings on tokens and padding beyond the part that both vocabularies have."""
    found: list[Finding] = []
    extra = [token for token in draft.tokenizer.tokens[len(target.tokenizer.tokens) :] if token is not None]
    if extra:
        found.append(
            Finding(
                "extra-tokens",
                "padding",
                f"the draft has {len(extra):,} tokens that the target has not: {', '.join(map(repr, extra[:SHOWN]))}",
                "they are never drafted",
                "none needed here; other engines may need the vocabularies cut to one length",
            )
        )
    if target.rows != draft.rows:
        found.append(
            Finding(
                "padding",
                "padding",
                f"the target's logits have {target.rows:,} columns and the draft's {draft.rows:,}; the rest is padding",
                "padding is never drafted nor chosen",
                "none needed here; other engines may need the shorter one padded",
            )
        )
    return found


def _mapping(target: Vocabulary, draft: Vocabulary) -> Finding:
    """The finding on whether cross-model can draft with this pair of vocabularies."""
    mapped = VocabMap(target.tokenizer, draft.tokenizer, target.rows, draft.rows)
    shared, needed = len(mapped.shared), min(MIN_SHARED, target.rows // 2)
    if shared < needed:
        return Finding(
            "vocabulary",
            "refuse",
            f"the two vocabularies share {shared:,} tokens; cross-model needs {needed:,}",
            "hardly any text could be drafted",
            "choose a model whose vocabulary is closer to the target's",
        )
    return Finding(
        "mapping",
        "note",
        f"{shared:,} tokens, {100 * mapped.coverage:.1f} % of the target's, stand for the same bytes in both",
        "cross-model drafts those, and spells out the others",
    )
