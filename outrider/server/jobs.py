"""What the worker is asked for, how whoever asked hears of it, and whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.core.errors import OutriderError
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.server.record import CURRENT

T = TypeVar("T")


class Unavailable(OutriderError):  # noqa: N818 - named for the state it tells of
    """Nothing is taken, or nothing more will come; says why and when to try again."""

    def __init__(self, message: str, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class QueueFull(Unavailable):
    """More waits than may."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            "as many requests wait as may; try again in a while, as Retry-After says", "queue_full", retry_after
        )


class TimeUp(Unavailable):
    """A request's deadline has passed."""

    def __init__(self) -> None:
        super().__init__("the request's time is up; ask for less, or later", "deadline_exceeded", 5)


@dataclass(frozen=True, slots=True)
class Score:
    """A text whose tokens are to be scored."""

    tokens: tuple[Token, ...]
    top: int
    """How many alternatives are told at each place."""
    salt: str = ""


Ask = Request | Score
"""A Request asks for one text: its n is 1."""
Told = Event | tuple[TokenLogprob, ...]
"""An event of a text, or the scores of a text: of every token but the first."""


@dataclass(slots=True, eq=False)
class Text:
    """One text of a job."""

    job: Job
    index: int
    ask: Ask
    admitted: float | None = None


class Job:
    """Texts asked for together. Iterate over it in the event loop that made it; cancel it when nobody listens."""

    def __init__(self, cancel: Callable[[Job], None], asks: Seq[Ask], client: str, deadline: float) -> None:
        self.client, self.deadline, self.arrived = client, deadline, time.perf_counter()
        self.texts = [Text(self, i, ask) for i, ask in enumerate(asks)]
        self.left = len(self.texts)
        """Texts that have not ended. Only the worker changes it."""
        self.record = CURRENT.get()
        """The HTTP request it belongs to, where there is one."""
        if self.record is not None:
            self.record.expect(len(self.texts))
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._mail: asyncio.Queue[list[tuple[int, Told]] | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Told]]:
        """(which text, what it was told) as it comes, to the end of all texts. Raises what ended them early."""
        left = len(self.texts)
        while left:
            mail = await self._mail.get()
            if isinstance(mail, Exception):
                raise mail
            for index, told in mail:
                left -= not isinstance(told, Event) or told.finish is not None
                yield index, told

    def cancel(self) -> None:
        """Free all it holds within a round. Nothing happens where it has ended."""
        self._cancel(self)

    def tell(self, mail: list[tuple[int, Told]]) -> None:
        """From the worker: what a round brought."""
        self._post(mail)

    def fail(self, error: Exception) -> None:
        """From the worker: nothing more will come."""
        self._post(error)

    def _post(self, mail: list[tuple[int, Told]] | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._mail.put_nowait, mail)
        except RuntimeError:  # the loop has closed: nobody listens any more
            self._cancel(self)


class FairQueue(Generic[T]):
    """What waits. Each client gets its turn; of what is its own the first comes first."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, client: str, item: T) -> None:
        self._clients.setdefault(client, deque()).append(item)
        self._count += 1

    def pop(self) -> T | None:
        """What is next of the client whose turn it is, who then goes to the end of the row."""
        if not self._clients:
            return None
        client, own = next(iter(self._clients.items()))
        item = own.popleft()
        self._count -= 1
        if own:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item

    def remove(self, client: str, is_gone: Callable[[T], bool]) -> list[T]:
        """Take out what of a client's own is gone."""
        own = self._clients.get(client, deque())
        gone = [item for item in own if is_gone(item)]
        kept = deque(item for item in own if not is_gone(item))
        if kept:
            self._clients[client] = kept
        else:
            self._clients.pop(client, None)
        self._count -= len(gone)
        return gone
