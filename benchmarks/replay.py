"""What `auto` decides, tried without a card: the engine and its controller over recorded texts, by a clock of tables.

    python benchmarks/record_texts.py TARGET TEXTS.json.gz [--texts 200] [--tokens 200] [--head block:model=FOLDER]
    python benchmarks/replay.py TEXTS.json.gz [--batches 4 16] [--texts 64] [--cells chat:0 code:1 mixed:0 ...]
                                              [--drafters model|head|cpu] [--noise .03]

Texts that a model wrote are served again, the next one beginning where one ends: engine, controller and lookups are the
real ones, the target says what was recorded, and a block head drafts what was recorded. A draft model, or a head that
was not recorded, is right at random, as often as RATES or HEAD_RATES say. No pass is computed; passes take what TIMES
and HEAD_TIMES say, about what Qwen2.5-Coder-1.5B takes on an H200 with a 0.5B draft model, or with a trained head.
A cell takes seconds of one core, and the same run gives the same figures.
It tells how good decisions are, not how fast anything is.

With `--drafters model`, lookups and the draft model (four tokens) are compared with `auto`, which chooses between them.
With `head`: lookups, the head, and the hybrid of both, whose drafts share rows (SHARE tokens a text on average); `auto`
chooses between lookups and the hybrid, as with a large target, and how many rows drafts share. The rules of head,
hybrid and sharing are the real ones too; see replayed_head.py. Lookups by themselves share no rows here.
With `cpu`: lookups, the head (HEAD_TOKENS) and `auto` where rounds do not overlap, with the times of a small model on
two cores; see replayed_cpu.py. `--noise` is how much passes of the same rows differ, as on a busy machine (the standard
deviation of the logarithm of their times). The engine sees these times, but the figures leave out what passes took
beyond the table: they tell whether noise made decisions worse, and not who met a slow pass.

For each cell: tokens a second of plain decoding by that clock, the others over it, `auto` over the best of all, and
whom `auto` asked, by rounds of a text. No text comes twice before all have come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from auto import KINDS
from replayed_cpu import CPU_TIMES, CpuHead, CpuLookups, CpuTarget, cpu_controller
from replayed_head import TOKENS, HeadTimes, Known, ReplayedHead
from replayed_target import CLOCK, WIDTHS, ReplayedDraft, ReplayedTarget, Times

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundKind
from outrider.control.decisions import Decisions
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.core.sampling import SamplingParams, Token
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.drafters.hybrid import with_hybrid
from outrider.drafters.mix import Mix
from outrider.drafters.none import NoDraft
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.adaptive import member_of
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.verify.base import make_verifier

TIMES = Times(
    passes={
        4: {4: 1.15, 8: 1.18, 16: 1.21, 24: 1.33, 32: 1.37, 48: 1.68, 64: 1.8},
        16: {16: 1.4, 32: 1.5, 64: 1.71, 96: 1.83, 128: 1.92, 192: 2.4, 256: 2.9},
    },
    step={4: 0.42, 16: 0.5},
)
HEAD_TIMES = HeadTimes(block={4: 0.185, 16: 0.24})
RATES = {"chat": 0.55, "code": 0.8, "summary": 0.65, "copy": 0.95, "random": 0.78}
HEAD_RATES = {"chat": 0.5, "code": 0.62, "summary": 0.53, "copy": 0.72, "random": 0.27}
"""How often the draft model and the head are right, at temperature 0; at 1, nine tenths of that."""
HEAD_TOKENS = 3
"""Tokens that the head drafts on a CPU where nobody decides."""
SHARE = 3
"""Tokens scored for a text on average, where nobody decides how many of a head's are."""
MAX_BATCH = 64
QUIET = 0.03
"""The noise of a quiet machine."""
CELLS = [f"{kind}:{temperature}" for temperature in (0, 1) for kind in KINDS] + ["mixed:0"]


class Compared(NamedTuple):
    """What `auto` has beside lookups decides what it is compared with."""

    engines: tuple[str, ...]
    """The first is what ratios are over, the last is `auto`."""
    rates: Mapping[str, float]


COMPARED = {
    "model": Compared(("plain", "lookups", "model", "auto"), RATES),
    "head": Compared(("plain", "lookups", "head", "hybrid", "auto"), HEAD_RATES),
    "cpu": Compared(("plain", "lookups", "head", "auto"), HEAD_RATES),
}


class Text(NamedTuple):
    prompt: list[Token]
    answer: list[Token]
    tokens: int
    """How many of the answer are asked for."""
    known: Known


class Served(NamedTuple):
    tokens: int
    seconds: float
    decisions: Decisions
    """What was decided for these texts."""


class Recorded:
    """Texts by kind and temperature, their tokens numbered anew: logits of a whole vocabulary would take long."""

    def __init__(self, cells: Seq[dict[str, Any]], rates: Mapping[str, float]) -> None:
        """rates: by kind, how often who drafts beside lookups is right."""
        self._rates = rates
        self._ids: dict[Token, Token] = {}
        self.texts = {
            (each["kind"], each["temperature"]): [
                (self._renumbered(prompt), self._renumbered(answer), drafts[0] if drafts else ())
                for prompt, answer, *drafts in each["texts"]
            ]
            for each in cells
        }
        self.vocab_size = 3 + len(self._ids)
        self._taken = Counter[tuple[str, float]]()

    def _renumbered(self, tokens: Seq[Token]) -> list[Token]:
        return [self._ids.setdefault(token, 3 + len(self._ids)) for token in tokens]

    def take(self, cell: str, count: int) -> list[Text]:
        """The next texts of a cell: of a kind and temperature; `mixed`: of all kinds in turn."""
        kind, _, temperature = cell.partition(":")
        kinds, rng = KINDS if kind == "mixed" else (kind,), random.Random(cell)
        return [self._next(kinds[i % len(kinds)], float(temperature), rng) for i in range(count)]

    def _next(self, kind: str, temperature: float, rng: random.Random) -> Text:
        texts = self.texts[kind, temperature]
        prompt, answer, drafts = texts[self._taken[kind, temperature] % len(texts)]
        self._taken[kind, temperature] += 1
        rate = self._rates[kind] * (0.9 if temperature else 1.0)
        return Text(prompt, answer, rng.randrange(len(answer) // 3, len(answer) - 7), Known(len(prompt), rate, drafts))


class Replay:
    """An engine over recorded texts."""

    def __init__(self, name: str, drafters: str, batch: int, vocab_size: int) -> None:
        """name, drafters: one of the engines of COMPARED, and its key there."""
        self.batch, self.times, self.known = batch, TIMES, dict[int, Known]()
        self.target = target = self._target(vocab_size)
        parts = self._parts(name, drafters)
        drafter = (NoDraft() if not parts else parts[0]) if len(parts) < 2 else Mix(parts, vocab_size)
        tokenizer: Any = SimpleNamespace(
            vocab_size=vocab_size, eos_ids=frozenset(), token_bytes=[b"x"] * vocab_size, own_texts=None,
            decode=lambda ids: "x" * len(ids),
        )  # fmt: skip
        self.engine = Engine(
            target,
            drafter,
            make_verifier("seeded"),
            tokenizer,
            limits=EngineLimits(max_batch=batch, max_round_tokens=2048),
            controller=self._controller(parts) if name == "auto" else None,
        )

    def _target(self, vocab_size: int) -> ReplayedTarget:
        return ReplayedTarget(self.batch, vocab_size, self.times)

    def _parts(self, name: str, drafters: str) -> list[Drafter]:
        """Who drafts in an engine of this name."""
        lookups: list[Drafter] = [self._lookups()] if name in ("lookups", "hybrid", "auto") else []
        if name in ("plain", "lookups"):
            return lookups
        if drafters == "head":
            share = 0 if name == "auto" else SHARE
            return with_hybrid([*lookups, ReplayedHead(self.target, self.known, HEAD_TIMES, share=share)], self.batch)
        target = self.target
        context = DrafterContext(vocab_size=target.vocab_size, context=target.context, max_batch=self.batch)
        draft = ReplayedDraft(target, lambda seq_id: self.known[seq_id].rate)
        return [*lookups, DraftModel(draft, context, DraftModelConfig(model="-", k=4))]

    def _lookups(self) -> DeviceLookup:
        min_prob = max(0.1, min(0.5, 0.008 * self.batch))
        drafter = DeviceLookup(SuffixConfig().rules(min_prob), self.target, self.batch)
        look_up, again, times = drafter.store.look_up, drafter.store.look_up_again, self.times

        def timed(*args: Any) -> Any:
            CLOCK.now += times.looking / 1e3
            CLOCK.launch(times.lookup / 1e3)
            return look_up(*args)

        def timed_again(*args: Any) -> Any:
            CLOCK.launch(times.lookup / 1e3)
            return again(*args)

        drafter.store.look_up, drafter.store.look_up_again = timed, timed_again
        return drafter

    def _controller(self, parts: Seq[Drafter]) -> Controller:
        """As `CostMeter` makes one, from the table."""
        batch, times, target = self.batch, self.times, self.target
        shapes, packed = target.pass_shapes(batch, WIDTHS[-1]), target.packed_shapes(batch, WIDTHS[-1])
        passes = PassTable(
            {(b, w): times.pass_seconds(batch, b * w) for b, w in shapes},
            padded=True,
            packed={(b, n): times.pass_seconds(batch, n) for b, _, n in packed},
        )
        steps = {
            each.traits.name: PassTable({(b, 1): self._token_seconds(each) for b, _ in shapes}, padded=True)
            for each in parts
            if each.traits.runs_model
        }
        costs = OverlappedCosts(passes, steps)
        for b in {b for b, _ in shapes}:
            costs.start_with(RoundKind(b, 1, b), times.pass_seconds(batch, b))
            for each in parts:
                kind = RoundKind(b, 2, 2 * b, (each.traits.name,))
                costs.start_with(kind, times.pass_seconds(batch, b) + 0.1e-3)
        controller = Controller([member_of(each, target, parts) for each in parts], costs, WIDTHS)
        plan = controller.plan

        def timed(*args: Any) -> Any:
            CLOCK.now += times.plan / 1e3
            return plan(*args)

        controller.plan = timed
        return controller

    def _token_seconds(self, drafter: Drafter) -> float:
        """Of one token of a draft: a pass of the draft model, or a head's share of what it drafts at once."""
        if drafter.step_model is not None:
            return self.times.step[self.batch] / 1e3
        return HEAD_TIMES.block[self.batch] / drafter.lengths[0] / 1e3

    def serve(self, texts: Seq[Text]) -> Served:
        """Serve texts, each after the first few when another ends."""
        asked, began, tokens, decisions = iter(texts), CLOCK.now, 0, Decisions()
        self._submit(islice(asked, self.batch))
        while self.engine.busy:
            CLOCK.now += self.times.host / 1e3
            for event in self.engine.step():
                if event.stats is not None:
                    CLOCK.now += self.times.ending / 1e3
                    tokens += event.stats.tokens
                    decisions.add(event.stats.decisions or Decisions())
                    self._submit(islice(asked, 1))
        return Served(tokens, CLOCK.now - began, decisions)

    def _submit(self, texts: Iterator[Text]) -> None:
        for text in texts:
            params = SamplingParams(max_tokens=text.tokens, ignore_eos=True)
            (seq_id,) = self.engine.submit(Request(prompt=tuple(text.prompt), params=params))
            self.target.texts[seq_id], self.known[seq_id] = text.prompt + text.answer, text.known


class CpuReplay(Replay):
    """The same on a CPU."""

    target: CpuTarget

    def __init__(self, name: str, batch: int, vocab_size: int, noise: float) -> None:
        """noise: as in `CpuTarget`."""
        self._noise = noise
        super().__init__(name, "cpu", batch, vocab_size)

    def serve(self, texts: Seq[Text]) -> Served:
        before = self.target.disturbed
        tokens, seconds, decisions = super().serve(texts)
        return Served(tokens, seconds - (self.target.disturbed - before), decisions)

    def _target(self, vocab_size: int) -> CpuTarget:
        self.times = Times({}, {}, host=CPU_TIMES.host, ending=CPU_TIMES.ending)
        return CpuTarget(self.batch, vocab_size, self._noise)

    def _parts(self, name: str, drafters: str) -> list[Drafter]:
        parts: list[Drafter] = [CpuLookups(self.target)] if name in ("lookups", "auto") else []
        if name in ("head", "auto"):
            parts.append(CpuHead(self.target, self.known, HEAD_TOKENS if name == "head" else TOKENS))
        return parts

    def _controller(self, parts: Seq[Drafter]) -> Controller:
        return cpu_controller(self.target, parts)


def replay_of(name: str, drafters: str, batch: int, vocab_size: int, noise: float = QUIET) -> Replay:
    """As the arguments of `Replay`. noise: as in `CpuTarget`; only a CPU has any."""
    if drafters == "cpu":
        return CpuReplay(name, batch, vocab_size, noise)
    return Replay(name, drafters, batch, vocab_size)


def run(recorded: Recorded, drafters: str, batch: int, cells: Seq[str], count: int, noise: float = QUIET) -> None:
    speeds: dict[tuple[str, str], float] = {}
    told: dict[str, str] = {}
    first, texts = recorded.take(cells[0], batch), {cell: recorded.take(cell, count) for cell in cells}
    base, *others = COMPARED[drafters].engines
    for name in (base, *others):
        replay = replay_of(name, drafters, batch, recorded.vocab_size, noise)
        replay.serve(first)
        for cell in cells:
            served = replay.serve(texts[cell])
            speeds[name, cell], told[cell] = served.tokens / served.seconds, _asked_most(served.decisions)
    columns = {name: max(6, len(name) + 1) for name in (*others, "best")}
    titles = " ".join(f"{name:>{width}}" for name, width in columns.items())
    print(f"{'cell':>10} {'batch':>5} {base:>7} {titles}  rounds of auto")
    over_best: list[float] = []
    for cell in cells:
        plain, auto = speeds[base, cell], speeds[others[-1], cell]
        over_best.append(auto / max(plain, *(speeds[name, cell] for name in others[:-1])))
        ratios = [*(speeds[name, cell] / plain for name in others), over_best[-1]]
        figures = " ".join(f"{ratio:>{width}.2f}" for ratio, width in zip(ratios, columns.values(), strict=True))
        print(f"{cell:>10} {batch:>5} {plain:>7.0f} {figures}  {told[cell]}", flush=True)
    print(f"auto over the best: {statistics.geometric_mean(over_best):.3f} on average, {min(over_best):.2f} at least")


def _asked_most(decisions: Decisions) -> str:
    """Who was asked most often, in per cent of the rounds of all texts."""
    rounds = Counter[str]()
    for (name, _), count in decisions.lengths.items():
        rounds[name or "none"] += count
    return ", ".join(f"{name} {100 * count / decisions.rounds:.0f}%" for name, count in rounds.most_common(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--texts", type=int, default=64, help="of a cell")
    parser.add_argument("--drafters", default="model", choices=[*COMPARED], help="who drafts beside lookups")
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=[*CELLS, "mixed:1"])
    parser.add_argument("--noise", type=float, help=f"with cpu: how much passes differ (default: {QUIET})")
    given = parser.parse_args()
    noise = QUIET if given.noise is None else given.noise
    if given.noise is not None and given.drafters != "cpu":
        parser.error("--noise: only with --drafters cpu")
    if not 0 <= noise <= 2:
        parser.error(f"--noise {noise}: between 0 and 2")
    if given.texts < 1:
        parser.error(f"--texts {given.texts}: at least 1")
    if given.drafters != "cpu" and not {*given.batches} <= {*TIMES.passes}:
        parser.error(f"--batches: times are known of {sorted(TIMES.passes)}")
    if not all(1 <= batch <= MAX_BATCH for batch in given.batches):
        parser.error(f"--batches: between 1 and {MAX_BATCH}")
    with gzip.open(given.file, "rt") as file:
        recorded = Recorded(json.load(file), COMPARED[given.drafters].rates)
    for batch in given.batches:
        run(recorded, given.drafters, batch, given.cells, given.texts, noise)


if __name__ == "__main__":
    main()
