"""Scripted drafters for tests: one that knows the answer, one that is always wrong, one that drafts random trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, RoundView, Traits


class BrokenContract(BaseException):
    """The engine broke the drafter contract. Not an Exception: the engine catches those and only drops the draft."""


class ScriptedDrafter(Drafter):
    """Proposes whatever a function of the sequence returns: `script(seq, budget) -> Draft`."""

    def __init__(self, script: Callable[[Sequence, int], Draft], name: str = "scripted", max_tokens: int = 6) -> None:
        self.script, self.traits = script, Traits(name=name, max_tokens=max_tokens)
        self.forgotten: list[int] = []

    def propose(self, view: RoundView) -> list[Draft]:
        return [self.script(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            if len(draft) and tuple(draft.tokens[node] for node in verdict.path) != verdict.tokens[:-1]:
                raise BrokenContract(f"sequence {seq.id}: the verdict's path is not its tokens")

    def forget(self, seq: Sequence) -> None:
        if seq.id in self.forgotten:
            raise BrokenContract(f"sequence {seq.id} was forgotten twice")
        self.forgotten.append(seq.id)


def oracle(texts: dict[tuple[Token, ...], Seq[Token]], max_tokens: int = 6) -> ScriptedDrafter:
    """Knows the answer to each prompt, and drafts just that."""

    def script(seq: Sequence, budget: int) -> Draft:
        answer = texts[tuple(seq.tokens[: seq.prompt_len])]
        return Draft(tuple(answer[seq.generated : seq.generated + budget]), source="oracle")

    return ScriptedDrafter(script, "oracle", max_tokens)


def liar(vocab_size: int, max_tokens: int = 6) -> ScriptedDrafter:
    """Always proposes random tokens: more than the budget, some outside the vocabulary, hardly ever right."""

    def script(seq: Sequence, budget: int) -> Draft:
        rng = random.Random(len(seq.tokens))
        return Draft(tuple(rng.randrange(vocab_size + 3) for _ in range(budget + 2)), source="liar")

    return ScriptedDrafter(script, "liar", max_tokens)


def random_trees(vocab_size: int, max_tokens: int = 8) -> ScriptedDrafter:
    """Random trees, siblings distinct, sometimes empty."""

    def script(seq: Sequence, budget: int) -> Draft:
        rng = random.Random(len(seq.tokens) * 31 + seq.tokens[-1])
        if budget == 0 or rng.random() < 0.2:
            return EMPTY
        tokens: list[Token] = []
        parents: list[int] = []
        while len(tokens) < budget:
            parent = rng.randrange(-1, len(tokens))
            token = rng.randrange(vocab_size)
            if (parent, token) not in set(zip(parents, tokens, strict=True)):
                tokens.append(token)
                parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), source="random-trees")

    return ScriptedDrafter(script, "random-trees", max_tokens)
