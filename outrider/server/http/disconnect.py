"""Work that stops when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientDisconnected(Exception):  # noqa: N818 - clients may leave: no error
    """The client has closed the connection."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await the work; cancel it and raise ClientDisconnected if the client leaves. The body must have been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
