"""The speed of a target with its new drafter against plain decoding, measured by the engine on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sampling import SamplingParams
from outrider.engine.results import Comparison
from outrider.engine.stats import Stats, total
from outrider.llm import LLM
from outrider.train.acceptance import distinct_bigrams


@dataclass(frozen=True, slots=True)
class Example:
    """One held-out prompt and its answer with drafts."""

    prompt: str
    html: str
    """The answer, each token shaded by where it came from."""
    tau: float
    bigrams: float
    kind: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Greedy answers to held-out prompts one at a time, plain and with drafts."""

    plain: float
    """Tokens a second of plain decoding."""
    drafted: float
    tau: float
    bigrams: float
    """Mean share of distinct bigrams of the answers."""
    plain_ms: float
    """Milliseconds of a round of plain decoding."""
    draft_ms: float
    verify_ms: float
    round_ms: float
    identical: float
    """Share of the answers that are the same with drafts. Without pinning, bf16 may round ties differently."""
    examples: tuple[Example, ...]

    @property
    def speedup(self) -> float:
        return self.drafted / self.plain if self.plain else 0.0

    def predicted(self, tau: float) -> float:
        """The speed-up to expect with this τ at the measured times of a round."""
        return tau * self.plain_ms / self.round_ms if self.round_ms else 0.0


def measure_speed(
    target: str,
    drafter: str,
    prompts: Seq[tuple[list[int], str]],
    *,
    max_tokens: int,
    device: str,
    done: Callable[[], None] = lambda: None,
) -> Measured:
    """Measure the speed with and without drafts. prompts: token ids, and the kind of each. done: called after each."""
    params, found = SamplingParams(max_tokens=max_tokens), list[Comparison]()
    with LLM(target, drafter=drafter, adaptive=False, max_batch=1, device=device) as llm:
        for ids, _ in prompts:
            found.append(llm.compare(ids, params))
            done()
        texts = [llm.tokenizer.decode(ids) for ids, _ in prompts]
    examples = [
        Example(
            text,
            each.speculative._repr_html_(),
            each.speculative.stats.tau,
            distinct_bigrams(list(each.speculative.tokens)),
            kind,
        )
        for text, each, (_, kind) in zip(texts, found, prompts, strict=True)
    ]
    plain, drafted = [each.plain.stats for each in found], [each.speculative.stats for each in found]
    alone, times = total(plain).times, total(drafted).times
    return Measured(
        plain=_rate(plain),
        drafted=_rate(drafted),
        tau=total(drafted).tau,
        bigrams=sum(each.bigrams for each in examples) / len(examples),
        plain_ms=_ms(alone.total - alone.read, alone.rounds),
        draft_ms=_ms(times.draft, times.rounds),
        verify_ms=_ms(times.verify, times.rounds),
        round_ms=_ms(times.total - times.read, times.rounds),
        identical=sum(each.identical for each in found) / len(found),
        examples=tuple(examples[:4]),
    )


def _rate(runs: Seq[Stats]) -> float:
    """Tokens a second of decoding, over runs one after another."""
    seconds = sum(each.ended - each.first for each in runs)
    return sum(each.tokens - each.first_tokens for each in runs) / seconds if seconds > 0 else 0.0


def _ms(seconds: float, rounds: int) -> float:
    return 1000 * seconds / rounds if rounds else 0.0
