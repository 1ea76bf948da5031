"""Compares how text becomes tokens in two models: normaliser, pre-tokeniser, merges, chat template, thinking mode."""

from __future__ import annotations

import json
from typing import Any

from outrider.check.findings import Finding
from outrider.core.errors import RequestError
from outrider.models.tokenizer import Tokenizer

PROBES = (
    "The quick brown fox jumps over 12345 lazy dogs; 3.14159 isn't 2,718.",
    "def f(x):\n    return x ** 2  # tab\there\n\n\n",
    "Ünïcödé ﬁne: Å Å é é, 東京タワー, مرحبا, Привет, 🙂👩‍👩‍👧",
    "  leading and trailing   spaces \r\n and CRLF  ",
    "ALL CAPS, MixedCase, https://example.org/a?b=c&d=e",
)
"""Texts that different normalisers and pre-tokenisers split differently."""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]
THINKING = ("enable_thinking", "<think>")
PARTS = {"normalizer": "normaliser", "pre_tokenizer": "pre-tokeniser", "merges": "merges"}
UNSEEN = "the draft reads the target's tokens, in pieces it was not trained on: fewer drafts are accepted there"


def check_pipelines(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Find where the same text becomes other tokens. For vocabularies whose ids are the same."""
    ours, theirs = (_parts(tokenizer) for tokenizer in (target, draft))
    found: list[Finding] = []
    split = [probe for probe in PROBES if target.encode(probe, special=False) != draft.encode(probe, special=False)]
    for part, name in PARTS.items():
        if ours[part] == theirs[part]:
            continue
        shown = "" if part == "merges" else f" ({_short(ours[part])} and {_short(theirs[part])})"
        if split:
            what = f"the {name} differs{shown}: {split[0][:40]!r} becomes other tokens"
            fix = f"take a draft with the target's {name}, or copy the target's tokenizer.json to the draft"
            found.append(Finding(part.replace("_", "-"), "caution", what, UNSEEN, fix))
        else:
            what = f"the {name} is written otherwise{shown}, and text becomes the same tokens"
            found.append(Finding(part.replace("_", "-"), "note", what))
    return found or [Finding("pipeline", "ok", "normaliser, pre-tokeniser and merges are the same")]


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    found = json.loads(tokenizer.to_json())
    return {
        "normalizer": found.get("normalizer"),
        "pre_tokenizer": found.get("pre_tokenizer"),
        "merges": (found.get("model") or {}).get("merges"),
    }


def _short(part: Any) -> str:
    if not isinstance(part, dict):
        return "none"
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    names = [str(each.get("type")) for each in inner if isinstance(each, dict)]
    return f"{part.get('type')}: {', '.join(names)}" if names else str(part.get("type"))


def check_templates(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Check whether the draft has the chat template of the target, by which conversations are written."""
    ours, theirs = target.template_text(), draft.template_text()
    if not ours:
        return [Finding("chat-template", "ok", "the target has no chat template: there is nothing to compare")]
    if not theirs:
        return [
            Finding(
                "chat-template",
                "caution",
                "the draft has no chat template",
                "it was not tuned for chat, or not with a template: fewer drafts of answers are accepted",
                "take an instruction-tuned draft of the target's family",
            )
        ]
    found = [_rendered(target, draft)]
    modes = [any(word in text for word in THINKING) for text in (ours, theirs)]
    if modes[0] != modes[1]:
        does, lacks = ("target", "draft") if modes[0] else ("draft", "target")
        found.append(
            Finding(
                "thinking",
                "caution",
                f"the {does} has a thinking mode and the {lacks} has none",
                "what one writes between <think> and </think> the other does not foresee",
                "turn thinking off for both (enable_thinking=false), or take a draft with the same mode",
            )
        )
    return found


def _rendered(target: Tokenizer, draft: Tokenizer) -> Finding:
    texts = [_render(tokenizer) for tokenizer in (target, draft)]
    if texts[0] == texts[1]:
        return Finding("chat-template", "ok", "both chat templates write a conversation alike")
    return Finding(
        "chat-template",
        "caution",
        f"the chat templates differ: the target's writes {texts[0][:60]!r}, the draft's {texts[1][:60]!r}",
        "chats are written by the target's template, which the draft was not trained on: fewer drafts are accepted",
        "take a draft of the target's own release, or distil one on the target's answers (`outrider train`)",
    )


def _render(tokenizer: Tokenizer) -> str:
    """CHAT as the template writes it, without the system message where the template takes none; else its error."""
    for messages in (CHAT, CHAT[1:]):
        try:
            return tokenizer.chat(messages)
        except RequestError as error:
            refused = str(error)
    return refused
