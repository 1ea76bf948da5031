"""Calls that run requests to their end on one engine, several at a time: each text's events wait in an inbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from outrider.core.sampling import SamplingParams, derive_seeds
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.progress_line import ProgressLine
from outrider.engine.request import Request
from outrider.engine.results import Comparison, Result, build_result

Watch = Callable[[Literal["plain", "speculative"], Event], None]
"""Called with each event of a comparison as it comes."""

WARM_UP_TOKENS = 16


class Calls:
    """Waiting for one text moves all others along. Events of requests submitted to the engine directly are dropped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: dict[int, list[Event]] = {}
        """By sequence id: its events that nobody has taken yet."""
        self._salts = 0

    def submit(self, request: Request) -> list[int]:
        ids = self.engine.submit(request)
        self.inbox.update({seq_id: [] for seq_id in ids})
        return ids

    def drop(self, ids: list[int]) -> None:
        """End texts that have not ended, and forget their events."""
        for seq_id in ids:
            if self.inbox.pop(seq_id, None) is not None:  # else they were dropped before
                self.engine.cancel(seq_id)

    def events(self, seq_id: int) -> Iterator[Event]:
        """One text's events to its end. All other texts are moved along; their events wait in the inbox."""
        inbox = self.inbox[seq_id]
        while True:
            while not inbox:
                if not self.engine.alive(seq_id):  # cancelled by another caller, who got its last event
                    return
                self._step()
            event = inbox.pop(0)
            yield event
            if event.finish:
                return

    def finish(
        self, requests: list[Request], watch: Callable[[Event], None] | None = None, *, shown: bool = False
    ) -> list[Result]:
        """Run requests together to their end; an error ends all of them. shown: with a progress bar."""
        submitted: list[list[int]] = []
        line: ProgressLine | None = None
        try:
            for request in requests:
                submitted.append(self.submit(request))  # noqa: PERF401 - what was submitted before an error is dropped
            seeds = {i: self.engine.live(i).seq.seed for ids in submitted for i in ids}
            line = ProgressLine(len(seeds)) if shown else None
            watchers = [each for each in (watch, line and line.add) if each is not None]
            while any(self.engine.alive(i) for i in seeds):
                for event in self._step():
                    for each in watchers if event.seq_id in seeds else ():
                        each(event)
            results = [[build_result(self.inbox[i], seeds[i]) for i in ids] for ids in submitted]
        finally:
            if line is not None:
                line.close()
            self.drop([i for ids in submitted for i in ids])
        return [replace(first, others=tuple(others)) for first, *others in results]

    def compare(self, request: Request, watch: Watch | None = None) -> Comparison:
        """The request without drafts, then with: see `LLM.compare`."""
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=derive_seeds(request.params)[0]))
        self._warm_up(request)
        undrafted = replace(request, max_draft=0)
        plain = self.finish([self._cold(undrafted)], partial(watch, "plain") if watch else None)
        speculative = self.finish([self._cold(request)], partial(watch, "speculative") if watch else None)
        return Comparison(plain=plain[0], speculative=speculative[0])

    def _step(self) -> list[Event]:
        """Run one round; its events go to the inbox."""
        events = [event for event in self.engine.step() if event.seq_id in self.inbox]
        for event in events:
            self.inbox[event.seq_id].append(event)
        return events

    def _cold(self, request: Request) -> Request:
        """The same request, with a salt that no cache has seen."""
        self._salts += 1
        return replace(request, salt=f"compare {self._salts}")

    def _warm_up(self, request: Request) -> None:
        """Take a few rounds like this request's; the end of its prompt twice over gives drafters something to draft."""
        twice = (request.prompt[-WARM_UP_TOKENS:] * 2)[: len(request.prompt)]
        params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=request.params.temperature, ignore_eos=True)
        self.finish([self._cold(replace(request, prompt=twice, params=params))])
