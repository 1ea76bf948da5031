"""A job: the sequences of one request, and what the engine's thread delivers for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from outrider.core.errors import OutriderError
from outrider.core.outputs import TokenLogprob
from outrider.engine.events import Event
from outrider.engine.request import CheckedRequest


class Unavailable(OutriderError):  # noqa: N818 - named for the state it reports
    """The server accepts no requests, or cannot finish this one. Says why and when to retry."""

    def __init__(self, message: str, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class QueueFull(Unavailable):
    """The queue has no room for the request."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            "as many requests wait as may; try again in a while, as Retry-After says", "queue_full", retry_after
        )


class DeadlineExceeded(Unavailable):
    """The request's deadline has passed."""

    def __init__(self) -> None:
        super().__init__("the request's time is up; ask for less, or later", "deadline_exceeded", 5)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A prompt to score: nothing is generated."""

    checked: CheckedRequest


JobRequest = CheckedRequest | ScoreRequest
"""A sequence to generate, with n = 1, or a prompt to score."""
JobOutput = Event | tuple[TokenLogprob, ...]
"""An event of a sequence, or the log-probabilities of all tokens of a scored prompt but the first."""


class JobRecord(Protocol):
    """Counts the sequences of one HTTP request, for its log line and trace."""

    def expect_sequences(self, count: int) -> None:
        """Expect `count` more sequences to finish. Called in the event loop."""
        ...

    def sequence_finished(self, event: Event, arrived: float, admitted: float | None) -> None:
        """One of them has finished. Called from any thread; the times are by time.perf_counter."""
        ...


@dataclass(frozen=True, slots=True)
class JobOwner:
    """Whose job it is, and how long it may take."""

    client: str = ""
    deadline: float = float("inf")
    """When the job fails with DeadlineExceeded, by time.perf_counter."""
    record: JobRecord | None = None


@dataclass(slots=True, eq=False)
class JobSequence:
    """One sequence of a job."""

    job: Job
    index: int
    request: JobRequest
    admitted: float | None = None
    """When it joined the batch, by time.perf_counter."""


class Job:
    """Sequences submitted together. Iterate over it in the event loop that made it; cancel it when nobody listens."""

    def __init__(self, cancel: Callable[[Job], None], requests: Seq[JobRequest], owner: JobOwner) -> None:
        self.owner, self.arrived = owner, time.perf_counter()
        self.sequences = [JobSequence(self, i, request) for i, request in enumerate(requests)]
        self.unfinished = len(self.sequences)
        """Sequences that have not finished. Changed on the engine's thread alone."""
        if owner.record is not None:
            owner.record.expect_sequences(len(self.sequences))
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[list[tuple[int, JobOutput]] | Exception] = asyncio.Queue()

    @property
    def client(self) -> str:
        return self.owner.client

    async def __aiter__(self) -> AsyncIterator[tuple[int, JobOutput]]:
        """(sequence index, output) until every sequence has finished. Raises the error that ends them early."""
        unfinished = len(self.sequences)
        while unfinished:
            outputs = await self._outputs.get()
            if isinstance(outputs, Exception):
                raise outputs
            for index, output in outputs:
                unfinished -= not isinstance(output, Event) or output.finish is not None
                yield index, output

    def cancel(self) -> None:
        """Free everything the job holds, within one round. Does nothing for a job that has finished."""
        self._cancel(self)

    def deliver(self, outputs: list[tuple[int, JobOutput]]) -> None:
        """Called on the engine's thread with the outputs of a round."""
        self._post(outputs)

    def fail(self, error: Exception) -> None:
        """Called on the engine's thread: iterating over the job raises this error."""
        self._post(error)

    def _post(self, outputs: list[tuple[int, JobOutput]] | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, outputs)
        except RuntimeError:  # the event loop is closed: nobody listens
            self._cancel(self)
