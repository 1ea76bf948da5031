"""Replays arrivals on replicas with continuous batching, as in `engine/scheduler.py`.

In each round every decoding sequence gains the tokens that the costs state, and prompts are read in chunks of what the
round has room for. A waiting request joins as soon as batch and cache have room. A request goes to the replica with the
fewest requests under way, as with nginx's least_conn. Equal rounds are simulated in one step, up to the end of a
sequence, or the arrival of a request that can join. `step=1` simulates them one by one; tests compare the two.

Replicas have a machine each, unless a `SharedMachine` is given.
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
    """A request, its progress, and the times of its answer, in seconds."""

    arrival: float
    prompt: int
    output: int
    read: int = 0
    """Prompt tokens read."""
    done: float = 0.0
    """Output tokens so far; 0 until the prompt is read."""
    joined: float = 0.0
    """When a replica admitted it."""
    first: float = 0.0
    """When its first output token came."""
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
        """Mean seconds of an output token after the first; None where there is only one."""
        return (self.end - self.first) / (self.output - 1) if self.output > 1 else None


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """One machine for all replicas. Where they need more cores than it has, each round takes longer in proportion."""

    cores: int
    chunk_seconds: float
    """Processor seconds of a chunk outside the engine: in the server, and in clients on the same machine. All tokens
    of a sequence in a round are one chunk."""
    threads: int = 1
    """The number of threads that an engine keeps busy."""

    def slowdown(self, busy: int, chunks: int, seconds: float) -> float:
        """The factor by which a round takes longer. busy: replicas that run a round. chunks, seconds: of the round."""
        return max(1.0, busy * (self.threads + self.chunk_seconds * chunks / seconds) / self.cores)


class Prices:
    """The costs as tables: by batch, and by the number of prompt tokens in a round."""

    def __init__(self, costs: ServingCosts, speculate: bool) -> None:
        self.costs = costs
        made = [costs.round_cost(max(1, batch), speculate) for batch in range(costs.max_batch + 1)]
        self.seconds, self.tokens = [seconds for seconds, _ in made], [tokens for _, tokens in made]
        self.alone = [costs.prompt_seconds(max(1, tokens)) for tokens in range(costs.max_round_tokens + 1)]
        """Seconds of a round that only reads prompts, by the number of prompt tokens."""
        self.beside = [max(0.0, each - costs.plain[0].seconds) for each in self.alone]
        """Seconds that prompt tokens add to a round in which sequences decode. The weights are read once for both."""
        self.draft_tokens = costs.draft_tokens if speculate else 0


@dataclass(slots=True)
class Replica:
    """One engine: its decoding, prefilling and waiting requests, and the rounds under way."""

    prices: Prices
    step: int
    """Max rounds that are simulated in one step."""
    waiting: deque[Served] = field(default_factory=deque[Served])
    reading: list[Served] = field(default_factory=list[Served])
    decoding: list[Served] = field(default_factory=list[Served])
    chunks: list[int] = field(default_factory=list[int])
    """Prompt tokens that the round under way reads of each of the first requests in `reading`."""
    began: float = 0.0
    rounds: int = 0
    """The number of rounds under way, since `began`; 0: the replica is idle."""
    context: float = 0.0
    """Tokens of context of all decoding sequences together."""
    held: int = 0
    """Tokens of cache reserved for the admitted requests."""
    busy: float = 0.0
    sequence_seconds: float = 0.0
    """`busy` times the number of sequences in the rounds, summed."""
    version: int = 0
    """Changes whenever rounds start or are cut short, so that an outdated end is recognised."""
    machine: SharedMachine | None = None

    @property
    def load(self) -> int:
        return len(self.decoding) + len(self.reading) + len(self.waiting)

    def start(self, now: float, busy: int) -> float:
        """Start the next rounds. Returns when they end. busy: replicas with rounds under way, this one included."""
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
        """Seconds of the next `rounds` rounds, if no sequence joins or ends between them."""
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
        """Cut the rounds under way to the current one, for a request that has just arrived. Returns when they end now;
        None: nothing changes, since at most one round is under way or the batch is full."""
        if self.rounds < 2 or len(self.decoding) >= self.prices.costs.max_batch:
            return None
        low, high = 1, self.rounds
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.began + self.seconds(middle) >= now else (middle + 1, high)
        self.rounds, self.version = low, self.version + 1
        return self.began + self.seconds(low)

    def finish(self, now: float) -> list[Served]:
        """Complete the rounds under way. Returns the requests whose answers ended."""
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
        """Choose the prompt tokens that the next round reads: of the requests in `reading` first, then of waiting ones,
        which are admitted while batch and cache have room."""
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
    """The outcome of replaying a trace on a number of replicas."""

    replicas: int
    speculate: bool
    served: tuple[Served, ...]
    busy: float
    """Seconds in which replicas ran rounds, summed over all replicas."""
    sequence_seconds: float
    """The same sum, with the seconds of each round multiplied by the number of its sequences."""

    @property
    def batch(self) -> float:
        """The mean number of sequences in a round, weighted by the rounds' time."""
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
    """Replay a trace. step: max rounds simulated in one step; on a shared machine always 1."""
    prices = Prices(costs, speculate)
    step = step if machine is None else 1
    fleet = [Replica(prices, step, machine=machine) for _ in range(replicas)]
    loads = [(0, i) for i in range(replicas)]  # (requests under way, replica); outdated entries are skipped
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
        for _ in range(min(len(ended), len(coming))):  # each client sends its next request once one is answered
            arrive(coming.popleft(), now)
    busy, sequences = sum(each.busy for each in fleet), sum(each.sequence_seconds for each in fleet)
    return Run(replicas, speculate, tuple(served), busy, sequences)
