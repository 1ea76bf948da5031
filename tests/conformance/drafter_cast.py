"""All drafters under test: each registered drafter, and some that know all, lie, or guess at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tiny_block import tiny_block
from tiny_eagle import tiny_eagle
from tiny_medusa import tiny_medusa
from tiny_mtp import tiny_mtp

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, TargetPass
from outrider.drafters.guard import draft_problem
from outrider.drafters.registry import DRAFTERS, parse_drafter
from outrider.models.decoder import Decoder
from outrider.runners.base import Runner
from outrider.runners.native import NativeRunner
from outrider.testing.drafters import BrokenContract, ScriptedDrafter, liar, random_trees

Answers = Mapping[tuple[tuple[Token, ...], int], Seq[Token]]  # (prompt, seed) -> what plain decoding answers

_NEEDS = {"draft-model": "draft-model:model=draft", "cross-model": "cross-model:model=other"}
"""How a drafter is spelled that cannot be made from its name alone."""
VARIANTS = (
    "suffix:width=3,min_prob=0",
    "prompt-lookup:k=3",
    "draft-model:model=draft,beams=3,k=3",
    "draft-model:model=other,k=4,min_prob=0.2",
    "draft-model:model=cramped,k=4",
    "suffix+draft-model:model=other",
)
SCRIPTED = ("oracle", "hidden-oracle", "wavering-oracle", "liar", "noise", "random-trees", "bad-trees")
NATIVE_ONLY = {
    "layer-skip": ("layer-skip:skip=0,k=3", "layer-skip:skip=1,k=2"),
    "eagle": ("eagle:model=tiny-eagle3,k=3", "eagle:model=tiny-eagle1,tree=7,depth=3,top_k=3"),
    "block": ("block:model=tiny-block", "block:model=tiny-block,tree=7"),
    "medusa": ("medusa:model=tiny-medusa,tree=0", "medusa:model=tiny-medusa,tree=9"),
    "mtp": ("mtp:model=tiny-mtp,k=2", "mtp:model=tiny-mtp,tree=6,depth=3,top_k=3"),
}
"""How drafters are spelled that read the layers of a native target."""
HEADS: dict[str, Callable[[Decoder], Path]] = {
    "tiny-eagle1": partial(tiny_eagle, "tiny-eagle1"),
    "tiny-eagle3": partial(tiny_eagle, "tiny-eagle3"),
    "tiny-block": tiny_block,
    "tiny-medusa": tiny_medusa,
    "tiny-mtp": tiny_mtp,
}
EVERYBODY = (*(_NEEDS.get(name, name) for name in DRAFTERS if name not in NATIVE_ONLY), *VARIANTS, *SCRIPTED)
EVERY_NATIVE = (*EVERYBODY, *(spec for specs in NATIVE_ONLY.values() for spec in specs))


@dataclass(frozen=True)
class Stage:
    """What a drafter is made for: the target's size, models to draft with, and the answers for those who know."""

    vocab_size: int
    context: int
    tokenizer: Any
    drafts: Callable[[str], Runner]
    """`draft` is the target itself once more, `other` a worse model, `cramped` one with hardly any cache."""
    mode: Literal["seeded", "distribution"] = "seeded"
    answers: Answers = field(default_factory=dict)
    target: Runner | None = None
    """The target's runner, for those in `NATIVE_ONLY`."""


@dataclass(frozen=True)
class LoadedDraft:
    """What `DrafterContext.load_runner` returns, as far as a drafter looks."""

    target: Runner
    tokenizer: Any


class Loud(Drafter):
    """A drafter whose failures fail the test: the engine would continue without its drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.traits = drafter, drafter.traits

    def propose(self, view: RoundView) -> Seq[Draft] | None:
        drafts = self._call(self.drafter.propose, view)
        for draft, budget in zip(drafts or (), view.budgets, strict=drafts is not None):
            problem = draft_problem(draft if view.room is None else replace(draft, share=None))
            if problem or len(draft) > budget:
                raise BrokenContract(problem or f"{len(draft)} tokens drafted of {budget}")
        return drafts

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        return self._call(self.drafter.repeat, view, drafts)

    def process(self, work: TargetPass) -> None:
        self._call(self.drafter.process, work)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self._call(self.drafter.observe, seqs, drafts, verdicts)

    def forget(self, seq: Sequence) -> None:
        self._call(self.drafter.forget, seq)
        if failures := self.drafter.take_failures(seq.id):
            raise BrokenContract(f"members of {self.traits.name} failed {failures} times")

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            raise BrokenContract(f"{self.traits.name} raised") from error


def with_heads(spec: str, target: NativeRunner) -> str:
    """A drafter's spelling with the folders of random heads for this target in place of their names."""
    for name, make in HEADS.items():
        if name in spec:
            spec = spec.replace(name, str(make(target.model.decoder)))
    return spec


def make_drafter(name: str, stage: Stage) -> Drafter:
    if name in SCRIPTED:
        return _scripted(name, stage)
    context = DrafterContext(
        vocab_size=stage.vocab_size,
        context=stage.context,
        mode=stage.mode,
        tokenizer=stage.tokenizer,
        eos_ids=stage.tokenizer.eos_ids,
        load_runner=lambda model, **_: LoadedDraft(stage.drafts(model), stage.tokenizer),
        target=stage.target,
    )
    if isinstance(stage.target, NativeRunner):
        name = with_heads(name, stage.target)
    return Loud(parse_drafter(name).build(context))


def _scripted(name: str, stage: Stage) -> ScriptedDrafter:
    if name == "liar":
        return liar(stage.vocab_size)
    if name == "random-trees":
        return random_trees(stage.vocab_size)
    script = {"oracle": _oracle, "hidden-oracle": _hidden, "wavering-oracle": _wavering}.get(name)
    if script is not None:
        return ScriptedDrafter(lambda seq, budget: script(seq, budget, stage), name, max_tokens=7)
    script = {"noise": _noise, "bad-trees": _bad_trees}[name]
    return ScriptedDrafter(lambda seq, budget: script(seq, budget, stage), name, max_tokens=6)


def _rng(seq: Sequence) -> random.Random:
    return random.Random(len(seq.tokens) * 1009 + seq.tokens[-1])


def _next(seq: Sequence, count: int, stage: Stage) -> list[Token]:
    answer = stage.answers.get((tuple(seq.tokens[: seq.prompt_len]), seq.seed), ())
    return list(answer[seq.generated : seq.generated + count])


def _oracle(seq: Sequence, budget: int, stage: Stage) -> Draft:
    """Just what comes."""
    return Draft(tuple(_next(seq, budget, stage)), source="oracle")


def _wavering(seq: Sequence, budget: int, stage: Stage) -> Draft:
    """What comes, with a wrong token in the middle, and what would have come behind it."""
    rng = _rng(seq)
    tokens = _next(seq, rng.randrange(budget + 1), stage)
    if tokens:
        at = rng.randrange(len(tokens))
        tokens[at] = (tokens[at] + 1 + rng.randrange(stage.vocab_size - 1)) % stage.vocab_size
    return Draft(tuple(tokens), source="wavering-oracle")


def _hidden(seq: Sequence, budget: int, stage: Stage) -> Draft:
    """What comes, as one branch of a tree: wrong siblings come before and after every right node."""
    rng, tokens, parents, parent = _rng(seq), [], [], -1
    for right in _next(seq, budget, stage):
        wrong = rng.sample([t for t in range(stage.vocab_size) if t != right], rng.randrange(3))
        family = [*wrong, right]
        rng.shuffle(family)
        here = len(tokens) + family.index(right)
        tokens += family
        parents += [parent] * len(family)
        parent = here
    return Draft(tuple(tokens), tuple(parents), source="hidden-oracle").first_nodes(budget)


def _noise(seq: Sequence, budget: int, stage: Stage) -> Draft:
    """Tokens at random, fewer than asked for, or none."""
    rng = _rng(seq)
    count = rng.randrange(budget + 1)
    return Draft(tuple(rng.randrange(stage.vocab_size) for _ in range(count)), source="noise")


def _bad_trees(seq: Sequence, budget: int, stage: Stage) -> Draft:
    """Trees with ids that do not exist and more nodes than were asked for."""
    rng = _rng(seq)
    if rng.random() < 0.2:
        return EMPTY
    pairs: dict[tuple[int, Token], None] = {}
    while len(pairs) < budget + 3:
        token = rng.choice((-1, stage.vocab_size, 1 << 40)) if rng.random() < 0.1 else rng.randrange(stage.vocab_size)
        pairs[rng.randrange(-1, len(pairs)), token] = None
    return Draft(tuple(token for _, token in pairs), tuple(parent for parent, _ in pairs), source="bad-trees")
