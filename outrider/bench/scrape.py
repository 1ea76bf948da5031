"""Counters that servers expose at /metrics, under vLLM's names: drafts and cache hits of a whole load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

TIMEOUT_SECONDS = 10
NAMES = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:prefix_cache_queries_total": "queried",
    "vllm:prefix_cache_hits_total": "hits",
}
POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(slots=True)
class Counters:
    """Sums over all labels but the position."""

    sums: dict[str, float] = field(default_factory=dict[str, float])
    positions: dict[int, float] = field(default_factory=dict[int, float])

    def since(self, before: Counters) -> Counters:
        sums = {name: value - before.sums.get(name, 0.0) for name, value in self.sums.items()}
        return Counters(sums, {i: value - before.positions.get(i, 0.0) for i, value in self.positions.items()})

    def spec_decode(self) -> dict[str, Any]:
        """vLLM's `spec_decode_*`; empty where nothing was drafted, or there are no such counters."""
        drafts, drafted, accepted = (self.sums.get(name, 0.0) for name in ("drafts", "drafted", "accepted"))
        if not drafts or not drafted:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * accepted / drafted,
            "spec_decode_acceptance_length": 1 + accepted / drafts,
            "spec_decode_num_drafts": int(drafts),
            "spec_decode_draft_tokens": int(drafted),
            "spec_decode_accepted_tokens": int(accepted),
            "spec_decode_per_position_acceptance_rates": [self.positions[i] / drafts for i in sorted(self.positions)],
        }

    def prefix_hit_rate(self) -> float | None:
        queried = self.sums.get("queried", 0.0)
        return self.sums.get("hits", 0.0) / queried if queried else None


def read_counters(text: str) -> Counters:
    """The counters in a text of Prometheus' format."""
    found = Counters()
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in NAMES:
            found.sums[NAMES[name]] = found.sums.get(NAMES[name], 0.0) + float(line.split()[-1])
        elif name == POSITION and (place := re.search(r'position="(\d+)"', rest)) is not None:
            at = int(place[1])
            found.positions[at] = found.positions.get(at, 0.0) + float(line.split()[-1])
    return found


def scrape(url: str, headers: Mapping[str, str]) -> Counters:
    """The counters of a server; none where it has no /metrics. url: of its API, ending in /v1."""
    asked = Request(f"{url.removesuffix('/v1')}/metrics", headers=dict(headers))  # noqa: S310 - http(s), see Api
    try:
        with urlopen(asked, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the same
            return read_counters(response.read().decode(errors="replace"))
    except (URLError, HTTPException, TimeoutError, ConnectionError, ValueError):
        return Counters()
