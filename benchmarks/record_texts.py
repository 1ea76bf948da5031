"""Texts for replay.py: what a model answers, and what a block head drafts behind every token of it.

    python benchmarks/record_texts.py TARGET TEXTS.json.gz [--texts 200] [--tokens 200] [--head block:model=FOLDER]

Prompts are of the kinds of auto.py, answers greedy and sampled at temperature 1. With `--head` the head is asked behind
every token, and nothing of its drafts is scored: so they are known wherever a round may begin. Kept of each: how many
of its tokens came, and how sure the head was of every token, in hundredths.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, cast

from auto import KINDS, prompts

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterConfig, DrafterContext, RoundView, Traits, for_target
from outrider.drafters.registry import parse_drafter
from outrider.llm import LLM
from outrider.loading.load import load

MIN_TOKENS, MAX_TOKENS = 32, 400
"""Of an answer: replay.py asks for a part of each, and the longest prompts leave room for so many."""
MAX_DRAFT = 16


class Judged(Drafter):
    """Asks a head behind every token and has nothing scored; what it drafted is judged by the text."""

    def __init__(self, head: Drafter) -> None:
        self.head, self.traits, self.rows = head, as_asked(head.traits), head.rows
        self._drafts: dict[int, list[tuple[list[Token], list[int]]]] = {}
        """By sequence, behind 1, 2, ... tokens of its answer: a draft, and how sure the head was, in hundredths."""

    def propose(self, view: RoundView) -> Seq[Draft]:
        drafts = self.head.propose(replace(view, room=None, compared=True)) or [EMPTY] * len(view.seqs)
        for seq, draft in zip(view.seqs, drafts, strict=True):
            behind = len(seq.tokens) - seq.prompt_len
            known = self._drafts.setdefault(seq.id, [])
            del known[behind - 1 :]  # of a made-up text of this id, by which the engine was prepared
            known += [([], [])] * (behind - 1 - len(known))  # no room was left to draft there
            sure = () if draft.confidence is None else draft.confidence.read()[: len(draft)]
            known.append(([*draft.tokens], [round(100 * float(each)) for each in sure]))
        return [EMPTY] * len(view.seqs)

    def forget(self, seq: Sequence) -> None:
        self.head.forget(seq)

    def judge(self, seq_id: int, answer: Seq[Token]) -> list[list[int]]:
        """Behind 1, 2, ... tokens of an answer: how many of the draft came, and how sure the head was of each."""
        told: list[list[int]] = []
        for behind, (tokens, sure) in enumerate(self._drafts.pop(seq_id, []), 1):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, answer[behind:], strict=False))
            told.append([len([*same]), *sure])
        return told


def as_asked(head: Traits) -> Traits:
    """Of a drafter that asks such a head in every round, once the text is known."""
    return replace(head, drafts_ahead=False, drafts_newcomers=False, shares=False)


@dataclass(frozen=True, kw_only=True)
class JudgedConfig:
    """A head as another configuration builds it, asked for its drafts alone."""

    head: DrafterConfig

    @property
    def traits(self) -> Traits:
        return as_asked(self.head.traits)

    def for_target(self, folder: Path) -> JudgedConfig:
        return replace(self, head=for_target(self.head, folder))

    def build(self, context: DrafterContext) -> Judged:
        return Judged(self.head.build(context))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("file", type=Path)
    parser.add_argument("--texts", type=int, default=200, help="of each kind and temperature")
    parser.add_argument("--tokens", type=int, default=200, help=f"of an answer, {MIN_TOKENS} to {MAX_TOKENS}")
    parser.add_argument("--head", default="", help="the head that drafts, as it is named for --drafter")
    parser.add_argument(
        "--together",
        type=int,
        default=64,
        help="answers at a time; with too many, rounds have no room to draft for all",
    )
    given = parser.parse_args()
    if not MIN_TOKENS <= given.tokens <= MAX_TOKENS:
        parser.error(f"--tokens {given.tokens}: {MIN_TOKENS} to {MAX_TOKENS}")
    loaded = load(given.target, max_batch=given.together, max_draft=MAX_DRAFT, context=2048)
    drafter = JudgedConfig(head=parse_drafter(given.head)) if given.head else "none"
    llm = LLM(loaded, drafter=drafter, max_batch=given.together, adaptive=False)
    cells = [record(llm, kind, temperature, given) for temperature in (0.0, 1.0) for kind in KINDS]
    with gzip.open(given.file, "wt") as out:
        json.dump(cells, out)


def record(llm: LLM, kind: str, temperature: float, given: argparse.Namespace) -> dict[str, Any]:
    """The texts of a kind: prompt, answer and, of a head, what came of its drafts."""
    params = SamplingParams(max_tokens=given.tokens, temperature=temperature, seed=1, ignore_eos=True)
    texts: dict[int, list[list[Any]]] = {}
    for each in islice(prompts(kind, llm.engine.target.vocab_size, 5), given.texts):
        request = llm.request([{"role": "user", "content": each}] if isinstance(each, str) else each, params)
        texts[llm.engine.submit(request)[0]] = [[*request.prompt], []]
    while llm.engine.busy:
        for event in llm.engine.step():
            texts[event.seq_id][1].extend(event.tokens)
    if given.head:
        for seq_id, text in texts.items():
            text.append(cast(Judged, llm.engine.drafter).judge(seq_id, text[1]))
        known = sum(len(draft) > 1 for *_, drafts in texts.values() for draft in drafts)
        if known < len(texts) * given.tokens // 2:
            raise SystemExit(
                f"{kind}: a draft behind {known} of {len(texts) * given.tokens} tokens: use a smaller --together"
            )
    print(f"{kind} at temperature {temperature:g}: {given.texts} texts", flush=True)
    return {"kind": kind, "temperature": temperature, "texts": [*texts.values()]}


if __name__ == "__main__":
    main()
