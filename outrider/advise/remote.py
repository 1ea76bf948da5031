"""Advice for a running server, from its own counters. They have vLLM's names, in this package's server too."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import dataclass

from outrider.core.errors import ConfigError, reason

TIMEOUT_S = 10.0
MAX_BYTES = 16 << 20
KEY_FIX = "set OPENAI_API_KEY to the server's key"
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
AT = "vllm:spec_decode_num_accepted_tokens_per_pos"
RUNNING = "vllm:num_requests_running"
MIN_DRAFTS = 200
"""The fewest drafts that advice is based on."""
PRICES = {"a head": 0.05, "a draft model": 0.15}
"""About what one more draft token costs, as a share of a target pass that is bound by memory."""
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters since it started, summed over its models."""

    drafts: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    running: float

    @property
    def tau(self) -> float:
        """Tokens a pass, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def survival(self) -> list[float]:
        """For each position, the share of all drafts whose token there was accepted."""
        return [each / self.drafts for each in self.accepted_at] if self.drafts else []

    @property
    def length(self) -> float:
        """Mean tokens of a draft."""
        return self.drafted / self.drafts if self.drafts else 0.0


def read_counters(url: str, key: str = "") -> Counters:
    """The counters of the server at `url`, which may end in /v1. ConfigError where they cannot be read, or none counts
    drafts. key: sent as a bearer token unless empty."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url takes an address such as http://127.0.0.1:8000; got {url!r}")
    address = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address, headers=headers)  # noqa: S310 - the scheme is checked above
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the same
            text = answer.read(MAX_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        fix = KEY_FIX if error.code in (401, 403) else "is it a running vLLM or Outrider server?"
        raise ConfigError(f"{address} answers {error.code}; {fix}") from error
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ConfigError(
            f"{address} cannot be read ({reason(error)}); is it a running vLLM or Outrider server?"
        ) from error
    return parse_counters(text, address)


def parse_counters(text: str, address: str) -> Counters:
    """The counters in a text of Prometheus' format. ConfigError where none counts drafts. address: for the message."""
    sums: dict[str, float] = {}
    at: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match[1].removesuffix("_total"), match[2] or "", _number(match[3])
        sums[name] = sums.get(name, 0.0) + value
        position = _POSITION.search(labels)
        if name == AT and position and int(position[1]) < 1024:
            at[int(position[1])] = at.get(int(position[1]), 0.0) + value
    if DRAFTS not in sums:
        raise ConfigError(f"{address} has no {DRAFTS}: the server does not speculate, or is neither vLLM nor Outrider")
    found = tuple(int(at.get(i, 0)) for i in range(max(at, default=-1) + 1))
    return Counters(int(sums[DRAFTS]), int(sums[DRAFTED]), int(sums[ACCEPTED]), found, sums.get(RUNNING, 0.0))


def best_length(counters: Counters, price: float) -> int:
    """The draft length with the most tokens a second, where a draft token costs `price` of a pass; 0: no draft pays."""
    best, tokens, chosen = 1.0, 1.0, 0
    for k, survival in enumerate(counters.survival, 1):
        tokens += survival
        if tokens / (1 + k * price) > best:
            best, chosen = tokens / (1 + k * price), k
    return chosen


def advise_remote(counters: Counters) -> list[str]:
    """The advice in sentences; the first is the verdict."""
    if counters.drafts < MIN_DRAFTS:
        return [f"too little to go by: {counters.drafts} drafts so far; ask again after at least {MIN_DRAFTS}"]
    chosen = {name: best_length(counters, price) for name, price in PRICES.items()}
    longest = len(counters.survival)
    told = [f"drafts of {n} where it is {name}" if n else f"none where it is {name}" for name, n in chosen.items()]
    lines = [f"best length: {'; '.join(told)}; it drafts {counters.length:.1f} tokens now"]
    lines.append(f"{counters.tau:.2f} tokens a pass over {counters.drafts:,} drafts")
    survival = ", ".join(f"{each:.2f}" for each in counters.survival)
    lines.append(f"accepted by position, of all drafts: {survival}")
    first = counters.survival[0] if counters.survival else 0.0
    if first < 0.5:
        lines.append("the first token is rejected more often than not: another drafter, or none, will be faster")
    if longest and chosen["a head"] == longest:
        lines.append("the last position still pays: try longer drafts")
    lines.append(
        "prices of a token assumed: " + ", ".join(f"{name} {price:.0%} of a pass" for name, price in PRICES.items())
    )
    return lines


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
