"""Time the rounds of a batch while all of it decodes: no prompt being read, no text ended yet."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.engine.stats import Stats, Times, total


@dataclass(slots=True)
class Measured:
    """What a batch did. Rates are of all its texts together."""

    batch: int
    tokens: int = 0
    """In the window: from the round after that in which the last text had its second tokens, to the first end."""
    seconds: float = 0.0
    rounds: int = 0
    whole_tokens: int = 0
    whole_seconds: float = 0.0
    """From the first prompt to the end, reading included."""
    times: Times = field(default_factory=Times)
    """Of the rounds in the window."""
    stats: Stats = field(default_factory=Stats)
    """Of all its requests, from prompt to end."""
    texts: list[tuple[Token, ...]] = field(default_factory=list[tuple[Token, ...]])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def whole_rate(self) -> float:
        return self.whole_tokens / self.whole_seconds if self.whole_seconds else 0.0

    @property
    def tau(self) -> float:
        """Tokens a text a round."""
        return self.tokens / (self.rounds * self.batch) if self.rounds else 0.0

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds if self.rounds else 0.0

    def split_ms(self) -> tuple[float, float, float]:
        """Milliseconds a round spent drafting, verifying, and on the rest."""
        each = 1000 / max(1, self.times.rounds)
        return self.times.draft * each, self.times.verify * each, self.times.host * each

    @property
    def host_share(self) -> float:
        """The rest, as a share of the round."""
        draft, verify, rest = self.split_ms()
        return rest / (draft + verify + rest) if draft + verify + rest else 0.0


def random_prompts(count: int, length: int, vocab_size: int, *, first: int = 0, seed: int = 0) -> list[list[Token]]:
    """Token ids from `first` on, no two prompts alike."""
    rng = random.Random(seed)
    return [[rng.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(
    engine: Engine,
    prompts: Seq[Seq[Token]],
    params: SamplingParams,
    *,
    salt: str,
    max_draft: int | None = None,
    to_end: bool = False,
) -> Measured:
    """Answer the prompts together and time the window in which all decode. max_draft: as in a Request.

    to_end: finish every text, even after the window; `texts` are then whole. Otherwise the rest is
    cancelled. ConfigError where no round has all of them decoding: `params.max_tokens` is too small.
    """
    requests = [Request(prompt=tuple(prompt), params=params, salt=salt, max_draft=max_draft) for prompt in prompts]
    ids = [engine.submit(request)[0] for request in requests]
    told: dict[int, list[Token]] = {i: [] for i in ids}
    found = Measured(len(ids))
    window = _Window(engine, ids)
    began = now = time.perf_counter()
    parts: list[Stats] = []
    while engine.busy:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            told[event.seq_id] += event.tokens
        window.see(events, now, found)
        if window.closed and not to_end:
            events += [event for i in ids if (event := engine.cancel(i))]
        parts += [event.stats for event in events if event.stats]
    found.whole_seconds, found.whole_tokens = now - began, sum(map(len, told.values()))
    if not found.rounds and not to_end:
        raise ConfigError(f"{len(ids)} texts of {params.max_tokens} tokens never decode together; ask for more tokens")
    found.stats, found.texts = total(parts), [tuple(told[i]) for i in ids]
    return found


class _Window:
    """Follows rounds, and counts those in which every text decodes.

    The round in which the last text gets its second tokens is still one of reading: a draft model
    reads the prompt then.
    """

    def __init__(self, engine: Engine, ids: Seq[int]) -> None:
        self.engine, self.last, self.closed = engine, ids[-1], False
        self._behind = dict.fromkeys(ids, 2)  # rounds until each text has settled
        self._opened = 0.0
        self._before = Times()

    def see(self, events: Seq[Event], now: float, found: Measured) -> None:
        """Note a round that ended at `now`."""
        if self.closed:
            return
        if self._opened:
            found.rounds += 1
            found.tokens += sum(len(event.tokens) for event in events)
            found.seconds = now - self._opened
        if any(event.finish for event in events):
            self.closed = True
            found.times = _less(self._times(events), self._before) if self._opened else Times()
        elif not self._opened:
            self._settle(events, now)

    def _settle(self, events: Seq[Event], now: float) -> None:
        for event in events:
            if event.tokens and (left := self._behind.pop(event.seq_id, 0)) > 1:
                self._behind[event.seq_id] = left - 1
            if event.tokens:
                self.last = event.seq_id
        if not self._behind:
            self._opened = now
            self._before = replace(self._times(events))

    def _times(self, events: Seq[Event]) -> Times:
        """The clocks of one text that was in every round of the window."""
        ended = next((event.stats for event in events if event.seq_id == self.last and event.stats), None)
        return (ended or self.engine.live(self.last).stats).times


def _less(times: Times, before: Times) -> Times:
    return Times(
        *(getattr(times, name) - getattr(before, name) for name in ("draft", "verify", "host", "read", "rounds"))
    )
