"""The host's work in a round where passes are captured, measured without a card: of plain decoding and of `auto`.

    python benchmarks/host_rounds.py [--batches 1 4 16 64] [--standing 0 0.3 0.9] [--profile]

The engine, the controller, the drafters and the host's side of captured work are the real ones, over a tiny model.
What only a card does has a stand-in: a replay writes made-up choices and takes the device's time on a clock of its own,
copies are there at once, and Triton is not imported. That clock goes by the processor time of this thread, times
`--host`, and waits for the device as the host would; all decisions are made by it. `--standing` is the share of draft
tokens that the target's choices agree with; lookups always find something, the longer the larger it is.

Prints processor time of this thread in µs a round by batch, the median of rounds among others of their kind. `plain`:
without a drafter. `lookup`, `block`: every plan asks for two tokens by them, of which none stands. `rest`: nobody is
asked. `planned`: a plan was made, and whoever it says was asked. `first`: the mean of a batch's first eight rounds.
Then, for each share and batch, the rounds of a whole answer by kind and its median speed over that of plain decoding,
by the clock. `--profile` lists the functions that take most of the processor time.

Left out: the driver's part of launches and copies (pinned memory, events), and sampling after a prompt. Costs of
passes are those of SmolLM2-135M on an H200, interpolated by rows.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from card_stand_ins import BLOCK, VOCAB, Card, Meter, put_stand_ins  # before anything else: it replaces Triton

from outrider.control.controller import Controller
from outrider.control.costs import RoundKind
from outrider.control.plan import Plan
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.block import Block, BlockConfig
from outrider.drafters.mix import Mix
from outrider.drafters.none import NoDraft
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.drafting import Proposal
from outrider.engine.engine import Engine
from outrider.engine.rehearsal import rehearse
from outrider.engine.request import EngineLimits, Request
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.runners.graph_runner import GraphRunner
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair
from outrider.verify.base import make_verifier

PROMPT, FIRST_ROUNDS = 60, 8
NAMES = {"suffix+prediction": "lookup"}


class Round(NamedTuple):
    """A step of the engine, which launches a round and completes the one before."""

    kind: str
    among: bool
    """That one was of the same kind."""
    us: float
    """Of the processor."""


class Rounds:
    """An engine over stand-ins, whose rounds are timed."""

    def __init__(self, name: str, batch: int, card: Card, ask: int | None = None) -> None:
        """name: none, head (drafts always) or auto. ask: the part that every plan asks, for two tokens of each."""
        put_stand_ins(card)
        pair, self.card, self.batch = synthetic_pair("tiny", dtype=torch.float32), card, batch
        self.target = target = NativeRunner(pair.draft, batch * 512, context=448)
        target.model.fused = target.asynchronous = True
        target.graphs, target.cpu_pass = GraphRunner(target.model), None
        context = DrafterContext(vocab_size=target.vocab_size, context=448, target=target, max_batch=batch)
        drafter: Drafter = NoDraft() if name == "none" else self._drafter(context)
        drafter = drafter.parts[-1] if name == "head" else drafter
        for _ in target.capture(batch, 1 + drafter.traits.max_tokens):
            pass
        controller = None if name == "head" else Meter(target, batch, None, ()).controller(drafter)
        limits = EngineLimits(max_batch=batch, max_round_tokens=2048)
        verifier = make_verifier("seeded")
        if controller is not None:
            rehearse(target, drafter, verifier, pair.tokenizer, limits, controller)
        self.engine = Engine(target, drafter, verifier, pair.tokenizer, limits=limits, controller=controller)
        self.rng, self.kind, self.plans = random.Random(0), "", 0
        self._watch(controller, ask)

    def _drafter(self, context: DrafterContext) -> Drafter:
        """As `auto` with a head."""
        decoder = self.target.model.decoder
        config = HeadConfig(
            kind="block", vocab_size=decoder.config.vocab_size, hidden_size=64, target_hidden_size=64, taps=(0, 1),
            layers=1, heads=4, kv_heads=2, head_dim=16, intermediate_size=64, rope=decoder.config.ropes[0],
            max_positions=4096, block_size=BLOCK, own_mask=True, sample_from_anchor=True,
        )  # fmt: skip
        head = Block(BlockConfig(), BlockHead(config, decoder), self.target, context)
        for _ in head.runner.capture(context.max_batch):
            pass
        lookups = [each.build(context) for each in (SuffixConfig(), PredictionConfig())]
        return Mix([*lookups, head], context.vocab_size)

    def _watch(self, controller: Controller | None, ask: int | None) -> None:
        """Note what kind each round is of."""
        propose, made = self.engine.drafting.propose, [0]

        def proposed(view: Any) -> Proposal | None:
            before, proposal = made[0], propose(view)
            if proposal is not None:
                plan = proposal.plan
                asked = () if plan is None else plan.kind.drafters
                self.kind = "plain" if plan is None else "+".join(map(NAMES.get, asked, asked))
                self.kind = "planned" if made[0] > before and ask is None else self.kind or "rest"
            return proposal

        def planned(seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
            made[0] += 1
            return plan(seq_ids, budgets)

        self.engine.drafting.propose = proposed
        if controller is not None:
            plan = controller.plan if ask is None else self._asking(controller, ask)
            controller.plan = planned

    def _asking(self, controller: Controller, ask: int) -> Callable[[Seq[int], Seq[int]], Plan]:
        member, widths = controller.members[ask], controller.widths
        steps = BLOCK if member.runs_model else 0

        def plan(seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
            count, lengths = len(seq_ids), [min(2, budget) for budget in budgets]
            kind = RoundKind(count, 1 + max(lengths), count + sum(lengths), (member.name,), steps)
            kind = controller.costs.padded_kind(kind, widths)
            return Plan(kind, lengths, [ask if n else -1 for n in lengths], 1.0, controller.costs.seconds(kind))

        return plan

    def answer(self, tokens: int) -> tuple[list[Round], float]:
        """Answer a batch of new prompts: the rounds of decoding, and tokens a second by the clock."""
        params, ids = SamplingParams(max_tokens=tokens, ignore_eos=True), list[int]()
        for _ in range(self.batch):
            prompt = tuple(self.rng.randrange(VOCAB) for _ in range(PROMPT))
            ids += self.engine.submit(Request(prompt=prompt, params=params))
        seqs = [self.engine.live(i).seq for i in ids]
        while not all(seq.generated for seq in seqs):
            self.engine.step()
        rounds, began, before = list[Round](), self.card.now(), sum(seq.generated for seq in seqs)
        while self.engine.busy:
            worked, last = self.card.worked(), self.kind
            self.engine.step()
            among = self.kind in (last, "planned")
            rounds.append(Round(self.kind, among, 1e6 * (self.card.worked() - worked)))
        return rounds, (sum(seq.generated for seq in seqs) - before) / (self.card.now() - began)


def measure(
    name: str, batch: int, standing: float, given: argparse.Namespace, ask: int | None = None
) -> tuple[list[list[Round]], float]:
    """The rounds of each answer, but for the first, and the median speed."""
    rounds = Rounds(name, batch, Card(given.host, standing), ask)
    rounds.answer(given.tokens)
    profile = cProfile.Profile() if given.profile and name != "none" else None
    if profile is not None:
        profile.enable()
    found = [rounds.answer(given.tokens) for _ in range(given.answers)]
    if profile is not None:
        profile.disable()
        print(f"\n{name}, batch {batch}, {standing:g} stand")
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return [each for each, _ in found], statistics.median(speed for _, speed in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--standing", type=float, nargs="+", default=[0.0, 0.3, 0.9])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--answers", type=int, default=4, help="batches of answers that are timed, one after another")
    parser.add_argument("--host", type=float, default=0.4, help="the clock's seconds for one of the processor")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    found, speeds = dict[tuple[str, int], list[float]](), list[str]()
    for batch in given.batches:
        answers, plain = measure("none", batch, 0.0, given)
        found["plain", batch] = [each.us for rounds in answers for each in rounds]
        for ask, name in enumerate(("lookup", "block")):
            answers, _ = measure("auto", batch, 0.0, given, ask)
            found[name, batch] = [each.us for rounds in answers for each in rounds if each.among and each.kind == name]
        for standing in given.standing:
            answers, speed = measure("auto", batch, standing, given)
            kinds = Counter(each.kind for rounds in answers for each in rounds)
            told = ", ".join(f"{kind} {count / given.answers:.1f}" for kind, count in kinds.most_common())
            speeds.append(f"{batch:>6}{standing:>9g}{speed / plain:>10.3f}  {told}")
            for rounds in answers:
                found.setdefault(("first", batch), []).append(statistics.mean(r.us for r in rounds[:FIRST_ROUNDS]))
                for each in rounds:
                    if each.kind in ("rest", "planned") and each.among:
                        found.setdefault((each.kind, batch), []).append(each.us)
    print(f"{'µs a round':>14}" + "".join(f"{f'batch {batch}':>18}" for batch in given.batches))
    for kind in dict.fromkeys(kind for kind, _ in found):
        print(f"{kind:>14}" + "".join(cell(found, kind, batch) for batch in given.batches))
    print(f"\n{'batch':>6}{'standing':>9}{'of plain':>10}  rounds of an answer", *speeds, sep="\n")


def cell(found: dict[tuple[str, int], list[float]], kind: str, batch: int) -> str:
    """The median µs of a kind of round, and that over a plain one."""
    if not found.get((kind, batch)):
        return f"{'-':>18}"
    us = statistics.median(found[kind, batch])
    return f"{us:>10.1f} ({us / statistics.median(found['plain', batch]):>5.2f})"


if __name__ == "__main__":
    main()
