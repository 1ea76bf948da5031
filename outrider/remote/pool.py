"""Polling the replicas: which are ready, and what they serve."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.remote.http_client import HttpClient
from outrider.remote.prefixes import PrefixTable
from outrider.remote.replica import EngineKind, Replica, ReplicaCard, ReplicaState, read_card
from outrider.remote.routing import choose
from outrider.remote.upstream import ReplicaError, ReplicaRefusedError, get
from outrider.server.ops.logs import log_event

POLL_SECONDS = 0.25
ANSWER_SECONDS = 0.7
"""How long /health may take; with POLL_SECONDS, a replica that hangs is left out within a second."""
CARD_SECONDS = 5.0
LOST_SECONDS = 10.0
"""Open streams of a replica that has not answered for this long are ended."""


class ReplicaPool:
    """Polls /health of every replica, and chooses one for each request. Used in one event loop."""

    def __init__(self, replicas: Seq[Replica], on_change: Callable[[], None]) -> None:
        """on_change: called whenever the state of a replica, or the reason for it, changes."""
        self.replicas = list(replicas)
        self.table = PrefixTable()
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, client: HttpClient) -> None:
        self._tasks = [asyncio.create_task(self._watch(replica, client)) for replica in self.replicas]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def usable(self) -> list[Replica]:
        """The replicas that are ready; where none is, those that have been slow for less than SLOW_SECONDS."""
        now = time.perf_counter()
        usable = [replica for replica in self.replicas if replica.usable(now)]
        return [replica for replica in usable if replica.state == "ready"] or usable

    @property
    def cards(self) -> list[ReplicaCard]:
        return [replica.card for replica in self.replicas if replica.card is not None]

    @property
    def kind(self) -> EngineKind:
        """The engine whose limits apply to requests: vLLM where any replica is one, since each must serve all."""
        return "vllm" if any(card.kind == "vllm" for card in self.cards) else "outrider"

    def choose(self, hashes: Seq[bytes], tried: Seq[Replica]) -> Replica | None:
        """The replica for a request, other than those already tried; None where there is no other."""
        usable = [replica for replica in self.usable() if replica not in tried]
        return choose(usable, hashes, self.table) if usable else None

    def note_failure(self, replica: Replica, error: ReplicaError) -> None:
        """A request failed at the replica. Unless it sent the error itself, it is left out until /health says 200."""
        replica.failures += 1
        if not isinstance(error, ReplicaRefusedError):
            self.set_state(replica, "dead", str(error))

    def set_state(self, replica: Replica, state: ReplicaState, problem: str = "") -> None:
        if (replica.state, replica.problem) == (state, problem):
            return
        was, replica.state, replica.problem = replica.state, state, problem
        replica.changed = replica.changed if was == state else time.perf_counter()
        level = logging.INFO if state == "ready" else logging.WARNING
        log_event("replica", level, url=replica.url, state=state, was=was, **({"why": problem} if problem else {}))
        if state == "dead":
            self.table.forget(replica.name)
        self._on_change()

    async def _watch(self, replica: Replica, client: HttpClient) -> None:
        while True:
            state, problem = await self._poll(replica, client)
            never = state == "dead" and replica.card is None  # it is still being started
            self.set_state(replica, "loading" if never else state, problem)
            unreachable = replica.state in ("dead", "slow") and time.perf_counter() - replica.changed > LOST_SECONDS
            if unreachable and replica.open:
                replica.cut_all(ReplicaError(f"it could not be reached for {LOST_SECONDS:g} seconds"))
            await asyncio.sleep(POLL_SECONDS)

    async def _poll(self, replica: Replica, client: HttpClient) -> tuple[ReplicaState, str]:
        try:
            status, _ = await get(client, replica.url, "/health", ANSWER_SECONDS)
            if status == 200 and (replica.card is None or replica.state in ("dead", "loading")):
                replica.card = self._checked(await self._fetch_card(replica, client))
        except TimeoutError:
            return ("loading" if replica.card is None else "slow"), "/health does not answer in time"
        except OSError as error:
            return "dead", f"it cannot be reached ({type(error).__name__})"
        except ValueError as error:
            return "dead", str(error)
        if status == 200:
            return "ready", ""
        return ("loading" if replica.card is None else "draining"), f"/health says {status}"

    async def _fetch_card(self, replica: Replica, client: HttpClient) -> ReplicaCard:
        answers = [await get(client, replica.url, path, CARD_SECONDS) for path in ("/v1/models", "/version")]
        if answers[0][0] != 200:
            raise ValueError(f"/v1/models says {answers[0][0]}; give its key with --engine-api-key")
        return read_card(*(json.loads(raw) for _, raw in answers))

    def _checked(self, card: ReplicaCard) -> ReplicaCard:
        """The card. ValueError where the others serve another model."""
        others = {other.model for other in self.cards} - {card.model}
        if others:
            raise ValueError(f"it serves {card.model!r}, the others {sorted(others)[0]!r}; replicas serve one model")
        return card
