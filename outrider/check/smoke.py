"""The smoke test: lets a pair draft for a few seconds and judges how many draft tokens the target accepts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from outrider.check.findings import Finding, Smoke
from outrider.core.errors import ConfigError, OutriderError
from outrider.llm import LLM

SECONDS = 10.0
CHUNK = 24
"""Tokens of each answer."""
MIN_DRAFTS = 8
MIN_FIRST, FAIR_FIRST = 0.1, 0.5
"""Shares of first draft tokens accepted: below MIN_FIRST the pair is refused, below FAIR_FIRST it may not pay."""
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three uses of a paper clip.",
    "Translate to French: The meeting is on Monday at nine.",
    "What is 17 times 23? Show each step.",
    "Summarize: The bridge was closed for repairs in May and opened again in July, a month later than planned.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How the pair is loaded, as options of `LLM`, and for how many seconds it drafts."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"
    context: int | None = None
    seconds: float = SECONDS

    def engine(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "quantize": self.quantize, "context": self.context}


def smoke_test(
    target: str, drafter: str, options: RunOptions, progress: Any = None
) -> tuple[list[Finding], Smoke | None]:
    """Load the pair and let it draft for `options.seconds`, greedily and in every round. Loading is not counted."""
    try:
        llm = LLM(target, drafter=drafter, max_batch=1, adaptive=False, progress=progress, **options.engine())
    except ConfigError as error:
        return [Finding("engine", "refuse", str(error), "the engine does not start with this pair")], None
    with llm:
        try:
            smoke = _run(llm, options.seconds)
        except OutriderError as error:
            return [Finding("engine", "refuse", str(error), "the pair does not run")], None
    return [_judge(smoke)], smoke


def _run(llm: LLM, seconds: float) -> Smoke:
    begun = time.perf_counter()
    for i, prompt in enumerate(cycle(PROMPTS)):
        if llm.tokenizer.template_text():
            llm.chat(prompt, max_tokens=CHUNK, salt=str(i), ignore_eos=True)
        else:
            llm.generate(prompt, max_tokens=CHUNK, salt=str(i), ignore_eos=True)
        if time.perf_counter() - begun >= seconds or i + 1 == 4 * len(PROMPTS):
            break
    stats = llm.stats
    reached = stats.all.drafted_at[0] if stats.all.drafted_at else 0
    return Smoke(
        tokens=stats.tokens,
        rounds=stats.all.rounds,
        drafted=stats.all.drafted,
        by_position=tuple(each / max(1, reached) for each in stats.all.accepted_at),
        tau=stats.tau,
        failures=stats.draft_failures,
        seconds=time.perf_counter() - begun,
    )


def _judge(smoke: Smoke) -> Finding:
    if smoke.failures:
        return Finding(
            "draft-failures",
            "refuse",
            f"the draft failed in {smoke.failures} rounds",
            "texts go on without drafts, and time is lost",
            "download the draft again; the log says what failed",
        )
    if smoke.drafted < MIN_DRAFTS:
        return Finding("acceptance", "note", f"only {smoke.drafted} tokens were drafted: too few to judge by")
    first = smoke.by_position[0]
    what = f"of first draft tokens {100 * first:.0f} % are accepted, {smoke.tau:.2f} tokens for each pass of the target"
    if first < MIN_FIRST:
        return Finding(
            "acceptance",
            "refuse",
            what,
            "the draft does not foresee this target: the text is right and slower than without drafts",
            "name the target it was made for, or a draft made for this one",
        )
    if first < FAIR_FIRST:
        return Finding(
            "acceptance",
            "caution",
            what,
            "drafting may not pay, above all at temperature 1 or in large batches",
            "leave the controller on (no --fixed), or take a closer draft",
        )
    return Finding("acceptance", "ok", what)
