"""Threads for what comes before the queue, such as tokenizing: few of them, and clients take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.server.jobs import FairQueue

T = TypeVar("T")


class Workshop:
    """Belongs to one event loop. How many may wait is up to whoever lets them in."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool, self._free = ThreadPoolExecutor(threads, name), threads
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def do(self, client: str, work: Callable[[], T]) -> T:
        """The result of work, done in a thread when it is this client's turn. Cancelled before that, it is not done."""
        loop = asyncio.get_running_loop()
        await self._turn(client)
        doing = self._pool.submit(work)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(self._next)

        doing.add_done_callback(done)  # not when the wait ends: work that nobody waits for still has its thread
        return await asyncio.wrap_future(doing)

    async def _turn(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same moment
                self._next()
            raise

    def _next(self) -> None:
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():  # or else it was cancelled
                turn.set_result(None)
                return
        self._free += 1
