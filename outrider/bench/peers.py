"""Compare with other engines: the same weights and prompts in one run, in which the engines take turns."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from outrider.bench.answers import answer_all, digest_of
from outrider.bench.conversations import Conversations
from outrider.bench.engines import PLAIN, Engines
from outrider.bench.offline import Tell
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import Line, RunFile
from outrider.bench.statistics import Estimate, median_estimate
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams, Token

WORKER = Path(__file__).parent / "peer_worker.py"
OURS = "outrider"
WARM_UP_TOKENS = 8
END_SECONDS = 20
CLEAR = 0.9
"""The level that an interval needs for a row to count as the winner: 5 repetitions reach it."""


class PeerError(OutriderError):
    """Another engine failed. The message is what it said."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    tokens: tuple[Token, ...]
    seconds: float
    first: float | None
    """Seconds to the first token; None where the engine does not tell."""


class System(Protocol):
    """One row of the comparison."""

    name: str

    def answer(self, prompt: Seq[Token], max_tokens: int) -> PeerAnswer:
        """Decode greedily, one sequence alone, with cold caches."""
        ...


class OutriderSystem:
    """A row of `Engines`."""

    def __init__(self, engines: Engines, row: str) -> None:
        self.name, self.row, self._engines, self._calls = f"{OURS} {row}", row, engines, 0

    def answer(self, prompt: Seq[Token], max_tokens: int) -> PeerAnswer:
        self._calls += 1
        salt = f"peers {self.row} {time.monotonic_ns()} {self._calls}"
        found = answer_all(
            self._engines.use(self.row), [prompt], [SamplingParams(max_tokens=max_tokens)], batch=1, salt=salt
        )
        (first,) = found.as_line()["first_token_seconds"]
        return PeerAnswer(tuple(found.answers[0].tokens), found.seconds, first)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """A worker to start: which Python runs it, what it loads, and its rows."""

    kind: str
    python: str
    options: dict[str, Any]
    rows: tuple[str, ...]


@dataclass(slots=True)
class Worker:
    """Another engine's process."""

    plan: PeerPlan
    process: subprocess.Popen[str]
    about: dict[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, if any, and read the next message. PeerError: what the engine said, or that it ended."""
        if self.process.stdin is None or self.process.stdout is None:
            raise PeerError(f"{self.plan.kind}: its process has no pipes")
        try:
            if request:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        told = json.loads(line) if line else {"error": f"its process ended with code {self.process.wait()}"}
        if "error" in told:
            raise PeerError(f"{self.plan.kind}: {told['error']}")
        return told


class WorkerSystem:
    """A row of another engine."""

    def __init__(self, worker: Worker, row: str) -> None:
        self.name, self._worker, self._row = f"{worker.plan.kind} {row}", worker, row

    def answer(self, prompt: Seq[Token], max_tokens: int) -> PeerAnswer:
        told = self._worker.ask(row=self._row, prompt=list(prompt), max_tokens=max_tokens)
        return PeerAnswer(tuple(told["tokens"]), told["seconds"], told["first"])


@contextmanager
def started(plan: PeerPlan, log: Path) -> Iterator[Worker]:
    """The worker, ready; it ends with the block. PeerError where it does not start. log: for what it prints."""
    command = [plan.python, str(WORKER), plan.kind, json.dumps(plan.options)]
    with log.open("a", encoding="utf-8") as printed:
        try:
            process = subprocess.Popen(  # noqa: S603 - the Python that the user named
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True
            )
        except OSError as error:
            raise PeerError(f"{plan.kind}: {plan.python} cannot be run: {error.strerror or error}") from error
    try:
        worker = Worker(plan, process)
        worker.about = worker.ask()["ready"]
        yield worker
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def installed(python: str) -> dict[str, bool]:
    """Which of the engines a Python has; none where it cannot be run."""
    modules = {"transformers": "transformers", "llama.cpp": "llama_cpp", "vllm": "vllm"}
    code = (
        f"import importlib.util as u, json; print(json.dumps([bool(u.find_spec(m)) for m in {list(modules.values())}]))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - see above
    except OSError:
        return {}
    return dict(zip(modules, json.loads(done.stdout), strict=True)) if done.returncode == 0 else {}


class PeersBench:
    """Measures every category and system of a run that its file does not hold yet."""

    def __init__(
        self, engines: Engines, prompts: Seq[BenchPrompt], run: RunFile, *, max_tokens: int, repeats: int
    ) -> None:
        self.engines, self.run, self.max_tokens, self.repeats = engines, run, max_tokens, repeats
        self.systems: list[System] = [OutriderSystem(engines, row) for row in engines.rows]
        self.left_out: list[str] = []
        """Engines that could not be started, and why."""
        encode = Conversations(engines.loaded.tokenizer).item
        self.items: dict[str, list[tuple[Token, ...]]] = {}
        for prompt in prompts:
            self.items.setdefault(prompt.category, []).append(encode(prompt, 0, (), 0, "").tokens)

    def measure_all(self, plans: Seq[PeerPlan], log: Path, tell: Tell) -> None:
        """Start the engines of the plans, then measure. Those that fail to start are left out, and named."""
        with ExitStack() as stack:
            for plan in plans:
                tell(f"starting {plan.kind}", 0, 1)
                try:
                    worker = stack.enter_context(started(plan, log))
                except PeerError as error:
                    self.left_out.append(f"{error} (what it printed is in {log})")
                    continue
                if self.run.find("system", kind=plan.kind) is None:
                    self.run.add({"part": "system", "kind": plan.kind, **worker.about})
                self.systems += [WorkerSystem(worker, row) for row in plan.rows]
            self._measure_systems(tell)

    def _measure_systems(self, tell: Tell) -> None:
        total, done = self.repeats * len(self.items) * len(self.systems), 0
        for category, items in self.items.items():
            plain = self._reference(category, items)
            for repetition in range(self.repeats):
                first = repetition % len(self.systems)
                for system in (*self.systems[first:], *self.systems[:first]):
                    place = {"category": category, "system": system.name, "repetition": repetition}
                    if self.run.find("measure", **place) is None:
                        tell(f"{category}, {system.name}, repetition {repetition + 1}", done, total)
                        self.run.add({"part": "measure", **place} | self._measure(system, items, plain))
                    done += 1

    def _reference(self, category: str, items: Seq[tuple[Token, ...]]) -> list[str]:
        """The digests of our own plain decoding's texts, from the run's file or made now."""
        known = self.run.find("reference", category=category)
        if known is None:
            ours = OutriderSystem(self.engines, PLAIN)
            texts = [digest_of(ours.answer(item, self.max_tokens).tokens) for item in items]
            known = {"part": "reference", "category": category, "texts": texts}
            self.run.add(known)
        return known["texts"]

    def _measure(self, system: System, items: Seq[tuple[Token, ...]], plain: Seq[str]) -> Line:
        system.answer(items[0], WARM_UP_TOKENS)
        answers = [system.answer(item, self.max_tokens) for item in items]
        texts = [digest_of(answer.tokens) for answer in answers]
        return {
            "tokens": sum(len(answer.tokens) for answer in answers),
            "seconds": sum(answer.seconds for answer in answers),
            "first_token_seconds": [answer.first for answer in answers],
            "texts": texts,
            "identical": sum(ours == theirs for ours, theirs in zip(plain, texts, strict=True)),
        }


@dataclass(frozen=True, slots=True)
class PeerSummary:
    """One system on one category."""

    category: str
    system: str
    repetitions: int
    tokens_per_second: Estimate
    identical: int
    """Texts equal to our plain decoding's, in the worst repetition."""
    texts: int
    time_to_first_token: float | None
    wins: str
    """`wins`: the fastest row, and faster than every row of other engines, in intervals of the paired ratios that
    exclude 1 and hold with a chance of at least CLEAR. `first, not clearly`: the fastest without them. Empty: another
    row is the fastest."""
    ratio: Estimate
    """Its tok/s over those of the fastest row of another engine, in the same repetition."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_peers(run: RunFile) -> list[PeerSummary]:
    lines = run.of("measure")
    found: list[PeerSummary] = []
    for category in dict.fromkeys(line["category"] for line in lines):
        own = [line for line in lines if line["category"] == category]
        rates: dict[str, dict[int, float]] = {}
        for line in own:
            rates.setdefault(line["system"], {})[line["repetition"]] = line["tokens"] / line["seconds"]
        found += [
            _peer_summary(category, system, [each for each in own if each["system"] == system], rates)
            for system in rates
        ]
    return found


def _peer_summary(category: str, system: str, lines: Seq[Line], rates: dict[str, dict[int, float]]) -> PeerSummary:
    medians = {name: median(each.values()) for name, each in rates.items()}
    others = [name for name in rates if name.partition(" ")[0] != system.partition(" ")[0]]
    rival = max(others, key=medians.__getitem__, default=system)
    shared = rates[system].keys() & rates[rival].keys()
    ratio = median_estimate([rates[system][r] / rates[rival][r] for r in sorted(shared)] or [1.0])
    leads = medians[system] == max(medians.values())
    clearly = bool(others) and all(_clearly(rates[system], rates[name]) for name in others)
    firsts = [each for line in lines for each in line["first_token_seconds"] if each is not None]
    return PeerSummary(
        category=category,
        system=system,
        repetitions=len(lines),
        tokens_per_second=median_estimate(list(rates[system].values())),
        identical=min(line["identical"] for line in lines),
        texts=len(lines[0]["texts"]),
        time_to_first_token=median(firsts) if firsts else None,
        wins="" if not leads else "wins" if clearly else "first, not clearly",
        ratio=ratio,
    )


def _clearly(ours: dict[int, float], theirs: dict[int, float]) -> bool:
    shared = ours.keys() & theirs.keys()
    ratio = median_estimate([ours[r] / theirs[r] for r in shared] or [0.0])
    return ratio.low > 1 and ratio.level >= CLEAR
