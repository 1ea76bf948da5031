"""Replays arrivals on replicas that batch continuously, as `engine/scheduler.py` does.

Every round each decoding sequence gains the tokens that the costs say; prompts are read in chunks of what a round has
room for; whoever waits joins as soon as batch and cache have room. A request goes to the replica with the fewest under
way, as with nginx's least_conn. Rounds that are alike are taken in one step: until a sequence ends, or a request
arrives that there is room for. `step=1` takes them one by one, and is what the steps are tested against.

Replicas have machines of their own, unless `SharedMachine` says what they share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from outrider.fleet.costs import ServingCosts
from outrider.fleet.trace import Arrival, Trace

_ALMOST = 1e-9


@dataclass(slots=True)
class Served:
    """A request and when it was answered."""

    arrival: float
    prompt: int
    output: int
    read: int = 0
    """Prompt tokens read."""
    done: float = 0.0
    """Output tokens, 0 until the prompt is read."""
    joined: float = 0.0
    """When a replica began with it."""
    first: float = 0.0
    """When its first token came."""
    end: float = 0.0

    @property
    def context(self) -> float:
        return self.read + self.done

    @property
    def wait(self) -> float:
        return self.joined - self.arrival

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is none."""
        return (self.end - self.first) / (self.output - 1) if self.output > 1 else None


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """One machine for all replicas. Where they ask for more than its cores, each round takes so much longer."""

    cores: int
    chunk_seconds: float
    """Processor time of a chunk outside the engine: of the server, and of clients that run there too. A sequence's
    tokens of a round are one chunk, however many."""
    threads: int = 1
    """That an engine keeps busy."""

    def slowdown(self, busy: int, chunks: int, seconds: float) -> float:
        """Of a round that would take so many seconds for so many chunks, while so many replicas have one."""
        return max(1.0, busy * (self.threads + self.chunk_seconds * chunks / seconds) / self.cores)


class Prices:
    """The costs as tables, by batch and by prompt tokens of a round."""

    def __init__(self, costs: ServingCosts, speculate: bool) -> None:
        self.costs = costs
        made = [costs.round_cost(max(1, batch), speculate) for batch in range(costs.max_batch + 1)]
        self.seconds, self.tokens = [seconds for seconds, _ in made], [tokens for _, tokens in made]
        self.alone = [costs.prompt_seconds(max(1, tokens)) for tokens in range(costs.max_round_tokens + 1)]
        """Of rounds that read so many prompt tokens and nothing else."""
        self.beside = [max(0.0, each - costs.plain[0].seconds) for each in self.alone]
        """What they add to a round of decoding sequences: weights are read once for both."""
        self.draft_tokens = costs.draft_tokens if speculate else 0


@dataclass(slots=True)
class Replica:
    """One engine: what it decodes, reads and has waiting, and the rounds under way."""

    prices: Prices
    step: int
    """Rounds that are taken at once, at most."""
    waiting: deque[Served] = field(default_factory=deque[Served])
    reading: list[Served] = field(default_factory=list[Served])
    decoding: list[Served] = field(default_factory=list[Served])
    chunks: list[int] = field(default_factory=list[int])
    """Prompt tokens that the round under way reads, of the first in `reading`."""
    began: float = 0.0
    rounds: int = 0
    """Under way from `began` on; 0: idle."""
    context: float = 0.0
    """Tokens before all that decode."""
    held: int = 0
    """Tokens of cache that are promised to those that run."""
    busy: float = 0.0
    sequence_seconds: float = 0.0
    """`busy`, counted for every sequence that took part."""
    version: int = 0
    """Of the rounds under way, which an arrival may cut short."""
    machine: SharedMachine | None = None

    @property
    def load(self) -> int:
        return len(self.decoding) + len(self.reading) + len(self.waiting)

    def start(self, now: float, busy: int) -> float:
        """Begin the next rounds; when they end. busy: replicas that have rounds under way, with this one."""
        self._admit(now)
        self.began, self.version, self.rounds = now, self.version + 1, 1
        if not self.chunks:
            tokens = self.prices.tokens[len(self.decoding)]
            left = ceil(min(each.output - each.done for each in self.decoding) / tokens - _ALMOST)
            self.rounds = max(1, min(left, self.step))
        seconds = self.seconds(self.rounds)
        if self.machine is not None:
            seconds *= self.machine.slowdown(busy, len(self.decoding), seconds)
        return now + seconds

    def seconds(self, rounds: int) -> float:
        """Of the next so many rounds, without any change of who takes part."""
        prices, costs, batch = self.prices, self.prices.costs, len(self.decoding)
        base, growth = prices.seconds[batch] if batch else 0.0, 0.0
        if self.chunks:
            read = sum(self.chunks)
            base += prices.beside[read] if batch else prices.alone[read]
            pairs = sum(chunk * each.read for chunk, each in zip(self.chunks, self.reading, strict=False))
            base += costs.prompt_context_seconds * pairs
        else:
            growth = batch * prices.tokens[batch] * rounds * (rounds - 1) / 2
        return rounds * base + costs.context_seconds * (rounds * (self.context - batch * costs.context) + growth)

    def cut(self, now: float) -> float | None:
        """A request has arrived: end the rounds under way with the one that is, if it can join; when, or None."""
        if self.rounds < 2 or len(self.decoding) >= self.prices.costs.max_batch:
            return None
        low, high = 1, self.rounds
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.began + self.seconds(middle) >= now else (middle + 1, high)
        self.rounds, self.version = low, self.version + 1
        return self.began + self.seconds(low)

    def finish(self, now: float) -> list[Served]:
        """Complete the rounds under way; those that ended."""
        self.busy += now - self.began
        self.sequence_seconds += (now - self.began) * (len(self.decoding) + len(self.reading))
        gained = self.rounds * self.prices.tokens[len(self.decoding)]
        for each in self.decoding:
            each.done += gained
        self.context += gained * len(self.decoding)
        for each, chunk in zip(self.reading, self.chunks, strict=False):
            each.read += chunk
            if each.read == each.prompt:
                each.done, each.first = 1.0, now
                self.decoding.append(each)
                self.context += each.context
        self.reading = [each for each in self.reading if not each.done]
        ended = [each for each in self.decoding if each.done >= each.output - _ALMOST]
        if ended:
            self.decoding = [each for each in self.decoding if each.done < each.output - _ALMOST]
            self.context = sum(each.context for each in self.decoding)
        for each in ended:
            each.end = now
            self.held -= each.prompt + each.output
        self.rounds, self.chunks = 0, []
        return ended

    def _admit(self, now: float) -> None:
        """Choose what of prompts is read: those begun first, then waiting ones as far as batch and cache have room."""
        costs = self.prices.costs
        spare = max(1, costs.max_round_tokens - len(self.decoding))
        spare -= min(spare // 2, len(self.decoding) * self.prices.draft_tokens)
        for each in self.reading:
            self.chunks.append(min(each.prompt - each.read, spare))
            spare -= self.chunks[-1]
        while self.waiting and spare > 0 and len(self.decoding) + len(self.reading) < costs.max_batch:
            each = self.waiting[0]
            more = each.prompt + each.output
            if self.held and self.held + more > costs.cache_tokens:
                break
            self.held += more
            each.joined = now
            self.reading.append(self.waiting.popleft())
            self.chunks.append(min(each.prompt, spare))
            spare -= self.chunks[-1]


@dataclass(frozen=True, slots=True)
class Run:
    """What a trace comes to on so many replicas."""

    replicas: int
    speculate: bool
    served: tuple[Served, ...]
    busy: float
    """Seconds of rounds, of all replicas together."""
    sequence_seconds: float
    """The same, of each round as often as it has sequences."""

    @property
    def batch(self) -> float:
        """Sequences in a round, the mean over the time that rounds take."""
        return self.sequence_seconds / self.busy

    @property
    def seconds(self) -> float:
        return max(each.end for each in self.served) - min(each.arrival for each in self.served)


def simulate(
    trace: Trace,
    costs: ServingCosts,
    replicas: int,
    *,
    speculate: bool,
    step: int = 1 << 30,
    machine: SharedMachine | None = None,
) -> Run:
    """Replay a trace. step: rounds that are taken at once, at most; one on a shared machine."""
    prices = Prices(costs, speculate)
    step = step if machine is None else 1
    fleet = [Replica(prices, step, machine=machine) for _ in range(replicas)]
    loads = [(0, i) for i in range(replicas)]  # by requests under way; entries that are out of date are skipped
    ends: list[tuple[float, int, int]] = []  # (when, replica, version)
    served: list[Served] = []
    coming = deque(trace.arrivals)
    begun = trace.clients or len(coming)
    arrivals = [coming.popleft() for _ in range(min(begun, len(coming)))]
    arrivals.reverse()

    def start(replica: Replica, now: float) -> float:
        busy = 1 + sum(each.rounds > 0 for each in fleet if each is not replica) if machine is not None else 1
        return replica.start(now, busy)

    def arrive(given: Arrival, now: float) -> None:
        while loads[0][0] != fleet[loads[0][1]].load:
            heappop(loads)
        at = heappop(loads)[1]
        replica = fleet[at]
        replica.waiting.append(Served(now, given.prompt, given.output))
        heappush(loads, (replica.load, at))
        end = replica.cut(now) if replica.rounds else start(replica, now)
        if end is not None:
            heappush(ends, (end, at, replica.version))

    while arrivals or ends:
        if arrivals and (not ends or arrivals[-1].seconds <= ends[0][0]):
            given = arrivals.pop()
            arrive(given, given.seconds)
            continue
        now, at, version = heappop(ends)
        replica = fleet[at]
        if version != replica.version:
            continue
        ended = replica.finish(now)
        served += ended
        if ended:
            heappush(loads, (replica.load, at))
        if replica.load:
            heappush(ends, (start(replica, now), at, replica.version))
        for _ in range(min(len(ended), len(coming))):  # of clients that ask one after another
            arrive(coming.popleft(), now)
    busy, sequences = sum(each.busy for each in fleet), sum(each.sequence_seconds for each in fleet)
    return Run(replicas, speculate, tuple(served), busy, sequences)
