"""What serving costs one replica: seconds and tokens of a round by batch size, and seconds of reading prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError

EXAMPLE = (
    '{"plain": [{"batch": 1, "seconds": 0.01, "tokens": 1}, ...], "speculative": [...], "prompts": [[16, 0.02], ...], '
    '"context": 64, "context_seconds": 0, "prompt_context_seconds": 0, "max_batch": 8, "max_round_tokens": 2048, '
    '"cache_tokens": 65536}'
)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The cost of a round at one batch size."""

    batch: int
    seconds: float
    tokens: float
    """Mean tokens that each sequence gains in a round: 1 without drafts."""


@dataclass(frozen=True, slots=True)
class ServingCosts:
    """The costs of serving with one replica."""

    plain: tuple[RoundCost, ...]
    """Rounds without drafts, by batch, from 1 up."""
    speculative: tuple[RoundCost, ...]
    """Rounds with drafts as the controller plans them, by batch; empty where there is no drafter."""
    prompts: tuple[tuple[int, float], ...]
    """(tokens, seconds) of rounds that read `tokens` prompt tokens and nothing else."""
    context: float
    """Mean number of tokens of context of a sequence in the timed rounds."""
    context_seconds: float
    """Seconds that each further token of a sequence's context adds to a round."""
    prompt_context_seconds: float
    """Seconds that each token of context adds to reading one prompt token."""
    max_batch: int
    max_round_tokens: int
    cache_tokens: int
    what: str = ""
    """Model, device and drafter, in words."""
    draft_tokens: int = 0
    """Tokens of a round that are kept for each decoding sequence's draft; for all together, at most half of the tokens
    that prompts could have otherwise."""

    def round_cost(self, batch: int, speculate: bool) -> tuple[float, float]:
        """(seconds of a round, tokens it brings each sequence), interpolated between the timed batches; beyond the last
        one, seconds are extrapolated and tokens are the last one's."""
        known = self.speculative if speculate else self.plain
        seconds = interpolate([(each.batch, each.seconds) for each in known], batch)
        tokens = interpolate([(each.batch, each.tokens) for each in known], min(batch, known[-1].batch))
        return seconds, max(1.0, tokens)

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds of a round that reads so many prompt tokens and nothing else."""
        return interpolate(self.prompts, tokens)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ServingCosts:
        """What `as_json` wrote. ConfigError for anything else."""
        try:
            plain, drafted = ([RoundCost(**each) for each in data[name]] for name in ("plain", "speculative"))
            prompts = [(int(n), float(s)) for n, s in data["prompts"]]
            given: dict[str, Any] = data | {
                "plain": tuple(plain),
                "speculative": tuple(drafted),
                "prompts": tuple(prompts),
            }
            costs = cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no costs of serving ({error!r}); they look like {EXAMPLE}") from error
        for each in (costs.plain, *([costs.speculative] if costs.speculative else [])):
            if not each or each[0].batch != 1 or any(e.seconds <= 0 or e.tokens <= 0 for e in each):
                raise ConfigError(f"costs of serving are above 0 and begin with a batch of 1; such as {EXAMPLE}")
        slack = min(
            e.seconds - e.batch * costs.context * costs.context_seconds for e in (*costs.plain, *costs.speculative)
        )
        if slack <= 0:
            raise ConfigError("context_seconds is too large: rounds without context would take no time")
        if not costs.prompts or min(costs.max_batch, costs.max_round_tokens, costs.cache_tokens) < 1:
            raise ConfigError(f"costs of serving lack prompts, or a bound is below 1; they look like {EXAMPLE}")
        return costs


def read_costs(file: Path) -> ServingCosts:
    """The costs in a file of their own, or in the JSON of an earlier plan. ConfigError where it cannot be read."""
    try:
        data = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--costs {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--costs {file}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--costs {file}: no JSON object; costs look like {EXAMPLE}")
    return ServingCosts.from_json(data.get("costs", data))


def interpolate(known: Seq[tuple[float, float]], at: float) -> float:
    """The value at `at`, interpolated linearly between the known (position, value) pairs. Before the first pair, that
    one's value; beyond the last, extrapolated from the last two, but never falling."""
    if at <= known[0][0] or len(known) == 1:
        return known[0][1]
    above = next((i for i, (x, _) in enumerate(known) if x >= at), len(known) - 1)
    (low, first), (high, last) = known[above - 1], known[above]
    slope = (last - first) / (high - low)
    return first + slope * (at - low) if at <= high else last + max(0.0, slope) * (at - high)
