"""Which replica a request goes to: where its beginning is cached, as far as the load allows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Seq

from outrider.remote.prefixes import PrefixTable
from outrider.remote.replica import Replica

LOAD_FACTOR = 1.25
"""How many times the mean load a replica may have and still be given what it has cached (bounded loads)."""


def choose(replicas: Seq[Replica], hashes: Seq[bytes], table: PrefixTable) -> Replica:
    """One of the replicas, which are one or more and all take requests; the table notes it.

    The first below the load limit: of those that have most of the prompt's beginning, then in the order of
    rendezvous hashing, which a replica that comes or goes changes only for its own requests.
    """
    limit = math.ceil(LOAD_FACTOR * (sum(replica.load for replica in replicas) + 1) / len(replicas))
    free = {replica.name: replica for replica in replicas if replica.load < limit}  # some load is below the mean
    known = next((free[name] for name in table.owners(hashes) if name in free), None)
    chosen = known or max(free.values(), key=lambda replica: _weight(hashes[0], replica.name))
    table.note(hashes, chosen.name)
    return chosen


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.sha256(key + name.encode()).digest()
