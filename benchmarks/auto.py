"""Whether `auto` is ever slower than plain decoding, and how near the best fixed choice it comes.

    python benchmarks/auto.py TARGET [--auto auto:model=DRAFT] [--fixed suffix draft-model:model=DRAFT,k=4]
        [--kinds chat code ... | --sets FILE ...] [--batches 1 4 16 64] [--temperatures 0 1] [--texts 32] [--threads 1]
        [--refill]

Prompts of five kinds, made up here, each seen for the first time: chat, code, summary, copy (edits of a given text) and
random tokens. `--sets`: prompts of files instead, as `outrider train collect` reads them; their answers end by
themselves. A batch begins together and shrinks as its texts end; with `--refill` the next text begins where one ends,
as in a server with so many users, and texts have half of `--tokens` to half more, so that they do not end together. For
each kind, batch and temperature: tokens per second of plain decoding, prompts
included, and of each drafter over that. Others draft always; `auto` decides, and `chosen` is what it did most often.
`plain again` is a second engine without a drafter, over the first: as far as it is from 1, so far may noise alone move
the others. `best` is `auto` over the fastest of the others, that one left out. `cpu` and `cpu best` are `auto` over
plain and over the best by the time that the processors worked, which a busy machine changes less than the clock; only
with `--threads 1` is it free of threads that wait for one another. `predicted` is what the controller believes to have
gained, over what was measured. `best in turn` is `best` for each part of a cell: the first parts show what it takes to
learn of texts that are unlike those before. The last rows are a load of all kinds together.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from outrider.control.decisions import Decisions
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.loading.load import load
from outrider.train.collect import encode_prompt
from outrider.train.prompts import read_prompts

TOPICS = (
    "bread", "glaciers", "chess", "bicycles", "volcanoes", "honey bees", "the printing press", "violins", "lighthouses",
    "coffee", "migration of birds", "bridges", "tides", "paper", "trains", "gardens", "maps", "clocks", "salt",
    "whales",
)  # fmt: skip
CHAT = (
    "What should a beginner know about {0}?",
    "Explain {0} to a child of ten.",
    "Give me three surprising facts about {0}.",
    "Write a short letter to a friend about {0}.",
    "Why do people care about {0}, and why did they in the past?",
    "Compare {0} and {1} in a few sentences.",
)
CODE = (
    "Write a Python class that stores facts about {0}, with methods to add, find and remove them.",
    "Write a function in JavaScript that sorts a list of records about {0} by name and then by year, with tests.",
    "Write a SQL schema and three queries for a database about {0} and {1}.",
    "Write a C program that reads lines about {0} from a file and counts the words.",
)
SUMMARY = "Summarize this text in two sentences.\n\n{text}"
COPY = (
    "Write this list again, with every line numbered and nothing else changed:\n\n{text}",
    "Repeat this text exactly, but write 'station' wherever it says 'place':\n\n{text}",
    "Turn these lines into a JSON array of objects with the fields name, count and place:\n\n{text}",
)
PLAIN, AUTO, CONTROL = "plain", "auto", "plain again"
_REFILLED = 6
"""Times a batch that texts of a cell begin in one run, with `--refill`."""
KINDS = ("chat", "code", "summary", "copy", "random")
Prompt = str | list[int]


def prompts(kind: str, vocab: int, seed: int) -> Iterator[Prompt]:
    """Endless prompts of a kind; no two are alike."""
    rng = random.Random(f"{kind} {seed}")
    while True:
        first, second = rng.sample(TOPICS, 2)
        if kind == "random":
            yield [rng.randrange(min(vocab, 50_000)) for _ in range(rng.randrange(60, 200))]
        elif kind in ("chat", "code"):
            told = f" Mention the number {rng.randrange(1000, 9999)}."
            yield rng.choice(CHAT if kind == "chat" else CODE).format(first, second) + told
        else:
            form = SUMMARY if kind == "summary" else rng.choice(COPY)
            yield form.format(text=_lines(rng) if kind == "copy" else _story(rng))


def _lines(rng: random.Random) -> str:
    return "\n".join(f"{rng.choice(TOPICS)}: {rng.randrange(1000)} at place {rng.randrange(99)}" for _ in range(14))


def _story(rng: random.Random) -> str:
    verbs = ("changed", "reached", "divided", "surprised", "connected", "delayed", "fed", "inspired")
    lines = [
        f"In {rng.randrange(1500, 2020)} {rng.choice(TOPICS)} {rng.choice(verbs)} the town near {rng.choice(TOPICS)}, "
        f"and {rng.randrange(3, 900)} people {rng.choice(verbs)} what {rng.choice(TOPICS)} had left behind."
        for _ in range(10)
    ]
    return " ".join(lines)


@dataclass(slots=True)
class Run:
    """One batch, from submission to the end; prompts are tokenized before."""

    seconds: float
    """A token, prompts included."""
    processor: float
    """Seconds a token that the processors worked."""
    tau: float
    believed: float
    """The gain that the controller believes in."""
    decisions: Decisions = field(default_factory=Decisions)


Asked = tuple[Prompt, SamplingParams]


def answer(llm: LLM, texts: list[Asked], salt: str, together: int = 0) -> Run:
    """together: texts that are answered at a time, the next one beginning where one ends; 0: all of them."""
    requests = [  # before the clock starts: a server's threads tokenize while its engine works
        llm.request([{"role": "user", "content": each}] if isinstance(each, str) else each, params, salt=salt)
        for each, params in texts
    ]
    asked = iter(requests)
    began, worked = time.perf_counter(), time.process_time()
    for request in islice(asked, together or None):
        llm.engine.submit(request)
    stats = []
    while llm.engine.busy:
        for event in llm.engine.step():
            if event.stats is not None:
                stats.append(event.stats)
                for request in islice(asked, 1):
                    llm.engine.submit(request)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    tokens, decisions = sum(each.tokens for each in stats), Decisions()
    for each in stats:
        decisions.add(each.decisions or Decisions())
    tau = tokens / max(1, sum(each.all.rounds for each in stats))
    believed = 1 + decisions.saved / (together or len(stats)) / seconds  # texts that are answered together save at once
    return Run(seconds / tokens, worked / tokens, tau, believed, decisions)


class Table:
    """The engines compared, and the cells measured."""

    def __init__(self, given: argparse.Namespace) -> None:
        loaded = load(
            given.target, max_batch=max(given.batches), max_draft=15, context=given.context, threads=given.threads
        )
        choices = {PLAIN: ("none", False)}
        choices |= {f"{i}:{spec.partition(':')[0]}": (spec, False) for i, spec in enumerate(given.fixed)}
        choices |= {AUTO: (given.auto, True), CONTROL: ("none", False)}
        self.llms = {
            name: LLM(loaded, drafter=spec, max_batch=max(given.batches), adaptive=adaptive)
            for name, (spec, adaptive) in choices.items()
        }
        self.given, self.vocab, self.lengths = given, loaded.target.vocab_size, random.Random(given.seed)
        self.sources: dict[str, Iterator[Prompt]] = {
            kind: prompts(kind, self.vocab, given.seed) for kind in given.kinds if kind in KINDS
        }
        for file in given.sets:
            self.sources[file.stem] = cycle(encode_prompt(loaded.tokenizer, each) for each in read_prompts(file, None))
        self.ratios: dict[str, list[float]] = {AUTO: [], CONTROL: []}
        """Over plain, of each cell, by the clock."""
        self.work_ratios: dict[str, list[float]] = {AUTO: [], CONTROL: []}
        # of the prompts that follow: what is drafted here is what the controller first learns of its drafters
        warm_up = [next(each) for each in islice(cycle(self.sources.values()), max(given.batches))]
        for name, llm in self.llms.items():  # a salt for each: they share pages
            answer(llm, [(each, SamplingParams(max_tokens=16, ignore_eos=True)) for each in warm_up], name)
        names = [f"{name:>14}" for name in choices]
        print(
            f"{'kind':>8} {'T':>3} {'batch':>5}"
            + "".join(names)
            + f"{'best':>8}{'cpu':>6}{'cpu best':>9}{'predicted':>10}  τ of each; chosen; best in turn",
            flush=True,
        )

    def params(self, temperature: float) -> SamplingParams:
        """Of the next text."""
        tokens = self.given.tokens
        if self.given.refill:
            tokens = self.lengths.randrange(tokens // 2, tokens + tokens // 2 + 1)
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=not self.given.sets)

    def cell(self, kinds: list[str], temperature: float, batch: int) -> None:
        """Measure one cell; every engine gets the same prompts, in turns."""
        texts = max(self.given.repeats, self.given.texts // batch) * batch
        size = min(texts, _REFILLED * batch) if self.given.refill else batch
        found: dict[str, list[Run]] = {name: [] for name in self.llms}
        for _ in range(texts // size):
            chosen = [(next(self.sources[kinds[i % len(kinds)]]), self.params(temperature)) for i in range(size)]
            for name, llm in self.llms.items():
                found[name].append(answer(llm, chosen, name, batch))
        speed = {name: 1 / statistics.mean(run.seconds for run in runs) for name, runs in found.items()}
        by_work = {name: 1 / statistics.mean(run.processor for run in runs) for name, runs in found.items()}
        plain, auto = speed[PLAIN], speed[AUTO]
        fixed = [name for name in self.llms if name not in (AUTO, CONTROL)]
        best, best_by_work = (max(each[name] for name in fixed) for each in (speed, by_work))
        fastest = max(fixed, key=speed.__getitem__)
        in_turn = " ".join(
            f"{other.seconds / run.seconds:.2f}" for run, other in zip(found[AUTO], found[fastest], strict=True)
        )
        predicted = statistics.mean(run.believed for run in found[AUTO]) / (auto / plain)
        taus = " ".join(f"{statistics.mean(run.tau for run in runs):.2f}" for runs in found.values())
        shown = "".join(
            f"{value if name == PLAIN else value / plain:>14.{0 if name == PLAIN else 2}f}"
            for name, value in speed.items()
        )
        for name in (AUTO, CONTROL):
            self.ratios[name].append(speed[name] / plain)
            self.work_ratios[name].append(by_work[name] / by_work[PLAIN])
        label = kinds[0] if len(kinds) == 1 else "mixed"
        print(
            f"{label:>8} {temperature:>3g} {batch:>5}{shown}{auto / best:>8.2f}{self.work_ratios[AUTO][-1]:>6.2f}"
            f"{by_work[AUTO] / best_by_work:>9.2f}{predicted:>10.2f}  {taus}; {_chosen(found[AUTO])}; {in_turn}",
            flush=True,
        )


def _chosen(runs: list[Run]) -> str:
    """What was decided most often, in per cent of the rounds."""
    total = Decisions()
    for run in runs:
        total.add(run.decisions)
    most = total.lengths.most_common(4)
    return ", ".join(f"{name or 'none'} {n} {100 * count / total.rounds:.0f}%" for (name, n), count in most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--auto", default="auto", help="the drafter that decides")
    parser.add_argument("--fixed", nargs="*", default=["suffix"], help="drafters that draft always")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--sets", nargs="+", default=[], type=Path, help="files of prompts, in place of kinds")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--texts", type=int, default=32, help="texts of a cell, at least; more than the batch: one after the other"
    )
    parser.add_argument("--repeats", type=int, default=1, help="batches of a cell, at least, each of other prompts")
    parser.add_argument("--refill", action="store_true", help="let the next text begin where one of a batch ends")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, help="of a CPU; by default as many as are fastest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this long")
    given = parser.parse_args()
    given.kinds = [file.stem for file in given.sets] or given.kinds
    table, end = Table(given), time.monotonic() + given.seconds
    cells = [([kind], t, batch) for t in given.temperatures for batch in given.batches for kind in given.kinds]
    cells.append((list(given.kinds), 0.0, given.batches[len(given.batches) // 2]))
    for kinds, temperature, batch in cells:
        if time.monotonic() < end:
            table.cell(kinds, temperature, batch)
    for clock, ratios in (("the clock", table.ratios), ("processor time", table.work_ratios)):
        for name, found in ratios.items():
            figures = f"lowest {min(found):.3f}, median {statistics.median(found):.3f}, highest {max(found):.3f}"
            print(f"{name} over plain by {clock}: {figures}")


if __name__ == "__main__":
    main()
