"""Enumerates the verification rules in float64: every draft and every random draw, compared with the target's law.

The package's own rules run on a small vocabulary. A law is a distribution of next tokens after all sampling options
(`law_after`). A round's tokens are continued by the target's law, so a correct rule gives exactly that law.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from typing import TypeVar

import torch
from torch import Tensor

from outrider.core.draft import Draft, TokenPath, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.prove.checks import Check
from outrider.prove.law import law_after
from outrider.verify.base import RULES, Mode, Rule
from outrider.verify.distribution import judge_draft
from outrider.verify.seeded import accept_draft

MAX_ERROR = 1e-12
VOCAB, LENGTH, DRAFTED = 3, 3, 2
PROMPT = (0, 1)
Joint = dict[TokenPath, float]
Drafts = Iterable[tuple[float, Draft]]
T = TypeVar("T")

OPTIONS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.75),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=0.75, frequency_penalty=0.5, repetition_penalty=1.25),
}


class EnumeratedRng:
    """Random draws that follow a script of outcomes, and after its end take the first possible outcome, which is added
    to the script. Records the possible outcomes of each draw, with their probabilities."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.options: list[list[tuple[int, float]]] = []

    def bernoulli(self, probability: float) -> bool:
        if not 0 <= probability <= 1:
            raise ValueError(f"a rule accepts with probability {probability}; it must be 0 to 1")
        return self._take([(1, probability), (0, 1 - probability)]) == 1

    def categorical(self, weights: Tensor) -> Token:
        return self._take(list(enumerate((weights / weights.sum()).tolist())))

    def _take(self, options: list[tuple[int, float]]) -> int:
        at = len(self.options)
        self.options.append([option for option in options if option[1] > 0])
        if at == len(self.script):
            self.script.append(0)
        return self.options[at][self.script[at]][0]

    @property
    def probability(self) -> float:
        return math.prod(options[i][1] for options, i in zip(self.options, self.script, strict=True))


def outcomes(run: Callable[[EnumeratedRng], T]) -> Iterator[tuple[float, T]]:
    """Every result of `run` with its probability, over all outcomes of the random draws that it makes."""
    script: list[int] = []
    while True:
        rng = EnumeratedRng(script)
        result = run(rng)
        yield rng.probability, result
        while script and script[-1] + 1 == len(rng.options[len(script) - 1]):
            script.pop()
        if not script:
            return
        script[-1] += 1


class RandomModel:
    """Random logits, different after every text of up to LENGTH tokens."""

    def __init__(self, seed: int) -> None:
        texts = [text for n in range(LENGTH + 1) for text in product(range(VOCAB), repeat=n)]
        table = torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5
        self._rows = dict(zip(texts, table, strict=True))

    def probs(self, text: TokenPath, params: SamplingParams) -> list[float]:
        return law_after(self._rows[text], params, PROMPT, text, frozenset()).probs.tolist()

    def joint(self, params: SamplingParams, start: TokenPath = ()) -> Joint:
        """The probability of each text of LENGTH tokens, given that it begins with `start`."""
        if len(start) >= LENGTH:
            return {start[:LENGTH]: 1.0}
        out: Joint = {}
        for token, chance in enumerate(self.probs(start, params)):
            if chance > 0:
                out |= {text: chance * rest for text, rest in self.joint(params, (*start, token)).items()}
        return out

    def score(self, draft: Draft) -> Tensor:
        """The logits before the draft and after each of its nodes: [1 + len(draft), vocab]."""
        paths = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(-1, len(draft))]
        return torch.stack([self._rows[path] for path in paths])


def chains(model: RandomModel, params: SamplingParams) -> Iterator[tuple[float, Draft]]:
    """Every chain that can be drawn from a model, with the probability of drawing it."""
    for tokens in product(range(VOCAB), repeat=DRAFTED):
        rows = [model.probs(tokens[:i], params) for i in range(DRAFTED)]
        chance = math.prod(row[token] for row, token in zip(rows, tokens, strict=True))
        if chance > 0:
            yield chance, Draft(tokens, probs=torch.tensor(rows, dtype=torch.float64))


def certain_chains() -> list[Drafts]:
    """Chains without stated probabilities, each as the only draft: the law must hold for every one of them alone."""
    return [[(1.0, Draft(tokens))] for tokens in product(range(VOCAB), repeat=DRAFTED)]


def forks(model: RandomModel, params: SamplingParams) -> Iterator[tuple[float, Draft]]:
    """Every tree of two first tokens and two children of the first, with the probability of drawing it. Siblings are
    drawn without replacement; there is only one where only one token has a probability above 0."""

    def drawn(probs: list[float]) -> Iterator[tuple[float, TokenPath]]:
        likely = [token for token, chance in enumerate(probs) if chance > 0]
        if len(likely) == 1:
            yield 1.0, (likely[0],)
        for one, two in permutations(likely, 2):
            yield probs[one] * probs[two] / (1 - probs[one]), (one, two)

    top = model.probs((), params)
    for chance, above in drawn(top):
        low = model.probs(above[:1], params)
        for rest, below in drawn(low):
            probs = torch.tensor([top] * len(above) + [low] * len(below), dtype=torch.float64)
            yield chance * rest, Draft((*above, *below), (-1,) * len(above) + (0,) * len(below), probs)


def rule_error(target: RandomModel, params: SamplingParams, drafts: Drafts, rule: Rule) -> float:
    """The total variation between the law of the first tokens under a rule and the target's law."""
    found: Joint = defaultdict(float)
    for drawn, draft in drafts:

        def judge(rng: EnumeratedRng, draft: Draft = draft) -> Verdict:
            seq = Sequence(0, list(PROMPT), len(PROMPT), params, 0)
            return judge_draft(seq, draft, target.score(draft), RULES[rule], rng)

        for answered, verdict in outcomes(judge):
            for text, rest in target.joint(params, verdict.tokens).items():
                found[text] += drawn * answered * rest
    right = target.joint(params)
    return math.fsum(abs(found.get(t, 0.0) - right.get(t, 0.0)) for t in found.keys() | right.keys()) / 2


def seeded_mismatches() -> tuple[int, int]:
    """(texts, wrong ones) in mode `seeded`: chains and trees, each with every combination of the target's choices.

    The verdict must be the path that the choices themselves take, as far as the draft holds it.
    """
    shapes = (None, (-1, -1, 0, 0), (-1, 0, 0, 1))
    texts = wrong = 0
    for parents, tokens in product(shapes, ((0, 1, 2, 0), (2, 0, 1, 2), (1, 2, 0, 1))):
        draft = Draft(tokens, parents=parents)
        for choices in product(range(VOCAB), repeat=1 + len(tokens)):
            node, text = -1, [choices[0]]
            while (held := [c for c in draft.children(node) if draft.tokens[c] == text[-1]]) != []:
                node = held[0]
                text.append(choices[node + 1])
            texts += 1
            wrong += accept_draft(draft, choices).tokens != tuple(text)
    return texts, wrong


def check_rules(mode: Mode, rule: Rule) -> Iterator[Check]:
    """Check each verification rule that an engine in this mode may use. rule: that of mode `distribution`."""
    if mode == "seeded":
        texts, wrong = seeded_mismatches()
        yield Check(
            group="rules",
            name="seeded: drafts against the target's choices",
            status="fails" if wrong else "holds",
            detail=f"{texts} combinations of choices, chains and trees; {wrong} wrong",
            figures={"combinations": texts, "wrong": wrong},
        )
        return
    target, drafter = RandomModel(1), RandomModel(2)
    kinds: dict[str, Callable[[SamplingParams], list[Drafts]]] = {
        f"chains ({rule} rule)": lambda params: [chains(drafter, params)],
        f"chains without probabilities ({rule} rule)": lambda _: certain_chains(),
        "trees": lambda params: [forks(drafter, params)],
    }
    for kind, made in kinds.items():
        errors = {
            name: max(rule_error(target, params, drafts, rule) for drafts in made(params))
            for name, params in OPTIONS.items()
        }
        worst = max(errors, key=errors.__getitem__)
        yield Check(
            group="rules",
            name=f"distribution: {kind}, enumerated",
            status="holds" if errors[worst] <= MAX_ERROR else "fails",
            detail=f"largest error {errors[worst]:.1e} (total variation), with {worst}; at most {MAX_ERROR:.0e}",
            figures={"error": errors[worst], "options": list(OPTIONS)},
        )
