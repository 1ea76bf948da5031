"""Which replica a request goes to: where its beginning is cached, as far as the load allows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Seq

from outrider.remote.prefixes import PrefixTable
from outrider.remote.replica import Replica

LOAD_FACTOR = 1.25
"""A replica with this many times the mean load is given no further request (consistent hashing with bounded loads)."""


def choose(replicas: Seq[Replica], hashes: Seq[bytes], table: PrefixTable) -> Replica:
    """Choose one of the replicas, at least one and all usable, and note it in the table.

    Of the replicas below the load limit: the one that was sent most of the prompt's beginning; if none was, the one
    that rendezvous hashing ranks first. A replica that comes or goes changes that only for its own requests.
    """
    limit = math.ceil(LOAD_FACTOR * (sum(replica.load for replica in replicas) + 1) / len(replicas))
    free = {replica.name: replica for replica in replicas if replica.load < limit}  # never empty
    known = next((free[name] for name in table.owners(hashes) if name in free), None)
    chosen = known or max(free.values(), key=lambda replica: _weight(hashes[0], replica.name))
    table.note(hashes, chosen.name)
    return chosen


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.sha256(key + name.encode()).digest()
