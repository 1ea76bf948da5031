"""A queue that serves clients in turn, and a thread pool that works from one."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def within_share(count: int, own: int, share: int, taken: int, room: int) -> bool:
    """Whether a full queue of `taken` sequences still accepts `count` from a client that has `own` in it.

    Other clients never keep a client out of its `share`, unless more than twice the `room` would be taken.
    """
    return own + count <= share and taken + count <= 2 * room


class FairQueue(Generic[ItemT]):
    """Round-robin between clients; first in, first out for each."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[ItemT]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, client: str, item: ItemT) -> None:
        self._clients.setdefault(client, deque()).append(item)
        self._count += 1

    def pop(self, may: Callable[[str], bool] = lambda _: True) -> ItemT | None:
        """Remove and return the first item of the next client for which `may` is true; that client then goes last."""
        client = next(filter(may, self._clients), None)
        if client is None:
            return None
        items = self._clients[client]
        item = items.popleft()
        self._count -= 1
        if items:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item

    def remove(self, client: str, matches: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove and return a client's items that match."""
        items = self._clients.get(client, deque())
        removed = [item for item in items if matches(item)]
        kept = deque(item for item in items if not matches(item))
        if kept:
            self._clients[client] = kept
        else:
            self._clients.pop(client, None)
        self._count -= len(removed)
        return removed


class FairThreadPool:
    """A few threads for work before the queue, such as tokenizing; clients take turns.

    Of several threads no client has all, so that its tasks alone never make another client wait. Belongs
    to one event loop. The caller bounds the number of tasks that wait.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._pool, self._free = ThreadPoolExecutor(threads, name), threads
        self._max_of_client = max(1, threads - 1)
        self._running: Counter[str] = Counter()
        """The number of threads that each client occupies."""
        self._waiting: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue()

    async def run(self, client: str, task: Callable[[], ResultT]) -> ResultT:
        """Run the task in a thread when it is this client's turn, and return its result.

        If cancelled before its turn, the task does not run.
        """
        loop = asyncio.get_running_loop()
        await self._acquire(client)
        running = self._pool.submit(task)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(self._release, client)

        running.add_done_callback(done)  # not when the wait ends: an abandoned task still occupies its thread
        return await asyncio.wrap_future(running)

    async def _acquire(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(client, (client, turn))
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same moment
                self._release(client)
            raise

    def _release(self, client: str) -> None:
        self._free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._give_turns()

    def _give_turns(self) -> None:
        while self._free and (waiting := self._waiting.pop(self._may_run)) is not None:
            client, turn = waiting
            if not turn.done():  # else it was cancelled
                self._free -= 1
                self._running[client] += 1
                turn.set_result(None)

    def _may_run(self, client: str) -> bool:
        return self._running[client] < self._max_of_client
