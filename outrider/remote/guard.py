"""Work that is cancelled when its client leaves, or from outside. It stays in its task; one more task watches."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Receive

from outrider.server.http.disconnect import ClientDisconnected


class Guard:
    """Use `async with` around work of the task that made the guard; `close` it after the last work.

    Inside the block, the work is cancelled as soon as there is an error, which is raised instead of CancelledError.
    """

    def __init__(self, receive: Receive) -> None:
        """receive: that of a request whose body has been read."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a guard is made in a task")
        self._task, self._within = task, False
        self.error: Exception | None = None
        self._watch = asyncio.ensure_future(self._until_left(receive))

    async def __aenter__(self) -> None:
        if self.error is not None:
            raise self.error
        self._within = True

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._within = False
        if self.error is None:
            return
        if kind is not asyncio.CancelledError:  # the work ended at the same moment: the cancellation is still to come
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        self._task.uncancel()
        raise self.error from None

    def end(self, error: Exception) -> None:
        """End the work with this error. Only the first error counts."""
        if self.error is None:
            self.error = error
            if self._within:
                self._task.cancel()

    def close(self) -> None:
        self._watch.cancel()

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnected())
