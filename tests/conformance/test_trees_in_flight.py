"""Trees drafted and accepted on the device: rounds of them follow each other, and texts are those of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from async_toy import ASYNC_TOY
from conformance_models import make_model, save, transformers_world
from drafter_cast import Answers
from plain_decoding import assert_same, request, run
from test_cancellation import assert_begins, run_with_cancels
from test_rounds_behind_rounds import PLACES, interrupt
from testbed import TOKENIZER, VOCAB, Testbed

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token, derive_seeds
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.models.load import load_decoder
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.testing.drafters import BrokenContract
from outrider.verify.base import make_verifier

MAX_NODES = 9
KINDS = {"trees": ("tree",), "mixed": ("tree", "chain", "none", "wrong")}
kinds = pytest.mark.parametrize("kind", KINDS)


class TreesAhead(Drafter):
    """Knows the answers and drafts from a DeviceState, on the device. What comes is one branch of a tree.

    `mixed`: the next sequence or round gets a chain, no draft, or a tree in which a token is wrong.
    """

    def __init__(self, answers: Answers, kind: str) -> None:
        self.answers, self.kinds = answers, KINDS[kind]
        self.traits = Traits(name="trees-ahead", max_tokens=MAX_NODES, drafts_ahead=True)
        self.drafted: Counter[str] = Counter()

    def propose(self, view: RoundView) -> list[Draft]:
        lengths = [len(s.tokens) for s in view.seqs] if view.state is None else view.state.lengths.tolist()
        last = [s.tokens[-2:] for s in view.seqs] if view.state is None else view.state.last.tolist()
        tokens, parents = torch.full((2, len(view.seqs), MAX_NODES), -7)
        blocks = HostCopy(tokens), HostCopy(parents)
        drafts: list[Draft] = []
        for i, (seq, budget) in enumerate(zip(view.seqs, view.budgets, strict=True)):
            text = [*seq.tokens[: seq.prompt_len], *self.answer(seq)]
            if lengths[i] <= len(text) and text[: lengths[i]][-2:] != last[i][-min(2, lengths[i]) :]:
                raise BrokenContract(f"sequence {seq.id} ends with {last[i]} at {lengths[i]}, not as it should")
            kind = self.kinds[(seq.id + lengths[i]) % len(self.kinds)]
            nodes = self.nodes(kind, text[lengths[i] :], random.Random(f"{seq.id} {lengths[i]}"))[:budget]
            self.drafted[kind] += bool(nodes)
            for node, (token, parent) in enumerate(nodes):
                tokens[i, node], parents[i, node] = token, parent
            rows = [DeviceRow(block, i, len(nodes)) for block in blocks]
            tree = Draft(rows[0], None if kind == "chain" else rows[1], source="trees-ahead", known=True)
            drafts.append(tree if nodes else EMPTY)
        return drafts

    def nodes(self, kind: str, coming: Seq[Token], rng: random.Random) -> list[tuple[Token, int]]:
        """(token, parent) of each node."""
        made: list[tuple[Token, int]] = []
        parent, wrong_at = -1, rng.randrange(3) if kind == "wrong" else -1
        for depth, right in enumerate(coming[:MAX_NODES] if kind != "none" else ()):
            others = rng.sample([t for t in range(VOCAB) if t != right], 0 if kind == "chain" else rng.randrange(3))
            family = [*others, right] if depth != wrong_at else others
            rng.shuffle(family)
            made += [(token, parent) for token in family]
            if right not in family:
                break
            parent = len(made) - len(family) + family.index(right)
        return made

    def answer(self, seq: Sequence) -> Seq[Token]:
        return self.answers[tuple(seq.tokens[: seq.prompt_len]), seq.seed]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """All of the draft that is the answer is accepted."""
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            if seq.finish is None and len(draft):
                coming = self.answer(seq)[seq.generated - len(verdict.tokens) :]
                child = {
                    key: i for i, key in enumerate(zip(map(draft.parent, range(len(draft))), draft.tokens, strict=True))
                }
                path: list[int] = []
                while (node := child.get((path[-1] if path else -1, coming[len(path)]))) is not None:
                    path.append(node)
                if verdict.path != tuple(path):
                    raise BrokenContract(f"sequence {seq.id}: {verdict.path} accepted of {path}")


def answers_of(world: Testbed, requests: Seq[Request]) -> Answers:
    return {
        (asked.prompt, seed): told.tokens
        for asked in requests
        for seed, told in zip(derive_seeds(asked.params), world.judged(asked), strict=True)
    }


def engine(
    world: Testbed, kind: str, requests: Seq[Request], limits: EngineLimits | None = None, cache_tokens: int = 4096
) -> Engine:
    target = world.target(cache_tokens)
    verifier, drafter = make_verifier("seeded"), TreesAhead(answers_of(world, requests), kind)
    return Engine(target, drafter, verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)


def asked_for(temperature: float) -> list[Request]:
    """Four texts of different lengths."""
    options = {"temperature": temperature, "ignore_eos": True}
    return [
        request([i + 1, 2 + int(temperature), 3], max_tokens=most, seed=i, **options)
        for i, most in enumerate((60, 33, 47, 60))
    ]


def check(tried: Engine, world: Testbed, requests: Seq[Request]) -> None:
    for told, asked in zip(run(tried, requests), requests, strict=True):
        assert_same(told, world.judged(asked))


@kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_trees_follow_each_other(kind: str, temperature: float):
    """Nearly every round is launched behind the one before, and accepts all that can be."""
    asked = asked_for(temperature)
    tried = engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=4))
    rounds = 0
    for each in asked:
        tried.submit(each)
    while tried.busy:
        rounds += 1
        tried.step()
    assert tried.target.followed > 0.7 * rounds  # pyright: ignore[reportAttributeAccessIssue]
    assert set(tried.drafter.drafted) == set(KINDS[kind])  # pyright: ignore[reportAttributeAccessIssue]
    assert tried.stats.all.accepted > (1.5 if kind == "trees" else 0.8) * tried.stats.all.rounds
    check(engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=4)), ASYNC_TOY, asked)


@kinds
def test_texts_that_stop_within_a_tree(kind: str):
    """By a stop token, a stop string or the end of text, anywhere in an accepted branch."""
    asked = [
        request([i + 1, 2], max_tokens=80, temperature=1.2, seed=i, stop_token_ids=(4,), stop=("ab", "gi"))
        for i in range(16)
    ]
    assert {ASYNC_TOY.judged(each)[0].finish for each in asked} == {"stop"}
    check(engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=5)), ASYNC_TOY, asked)


@kinds
def test_every_option(kind: str):
    """Those that the device cannot follow too."""
    asked = ASYNC_TOY.pairwise_requests()[:40]
    check(engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=8, max_round_tokens=60)), ASYNC_TOY, asked)


@kinds
@pytest.mark.parametrize("spare", [16, 32, 48, 80])
def test_pages_that_a_round_in_flight_writes_to_are_nobody_elses(kind: str, spare: int):
    """A pool that holds the texts and hardly more: what one gives back another takes at once."""
    asked = [request([i + 1] * (1 + i), max_tokens=75 - i, seed=i, ignore_eos=True) for i in range(9)]
    check(engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=9), 9 * 80 + spare), ASYNC_TOY, asked)


@kinds
@pytest.mark.parametrize("seed", range(6))
def test_cancelled_in_flight_with_everything_tight(kind: str, seed: int):
    asked = [*asked_for(0.0), *asked_for(1.0)]
    tried = engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=4, max_round_tokens=30), 160)
    finishes: set[str] = set()
    for made, told, n in run_with_cancels(tried, asked, random.Random(seed)).values():
        finishes.add(told.finish)
        if told.finish == "cancelled":
            assert_begins(told, ASYNC_TOY.judged(made)[n], made.prompt)
        else:
            assert_same([told], [ASYNC_TOY.judged(made)[n]])
    assert "cancelled" in finishes


@kinds
@pytest.mark.parametrize("place", [name for name in PLACES if name != "process"])
def test_an_interrupt_leaves_the_other_texts_right(kind: str, place: str):
    """What `advance` moved together for a round that was given up is scored again."""
    asked = asked_for(1.0)
    interrupts = 0
    for at in (2, 3, 5, 8):
        tried = engine(ASYNC_TOY, kind, asked, EngineLimits(max_batch=4))
        first, *others = (tried.submit(each)[0] for each in asked)
        texts = [tried.live(i).seq for i in others]
        interrupt(tried, PLACES[place], at)
        while tried.busy:
            try:
                tried.step()
            except KeyboardInterrupt:
                interrupts += 1
                tried.cancel(first)
            tried.check()
        for text, each in zip(texts, asked[1:], strict=True):
            assert tuple(text.tokens[text.prompt_len :]) == ASYNC_TOY.judged(each)[0].tokens
    assert interrupts > 0


class AsyncNativeRunner(NativeRunner):
    """The native runner on the CPU, its passes counted as launched: keys and values are moved by `advance` alone."""

    followed = 0

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.asynchronous = True
        self.followed += after is not None
        return super().score(spans, after)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Testbed:
    folder: Path = tmp_path_factory.mktemp("llama")
    model = make_model("llama")
    decoder = load_decoder(save(model, folder), device="cpu")
    return Testbed(transformers_world(model), lambda tokens: AsyncNativeRunner(decoder, tokens), ASYNC_TOY.draft)


@kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_real_model(native: Testbed, kind: str, temperature: float):
    """The text is what Transformers says, from keys and values that were moved together."""
    asked = asked_for(temperature)
    tried = engine(native, kind, asked, EngineLimits(max_batch=4))
    check(tried, native, asked)
    assert tried.target.followed > 10  # pyright: ignore[reportAttributeAccessIssue]
    assert tried.stats.all.accepted > 100
