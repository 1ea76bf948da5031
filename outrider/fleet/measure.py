"""Measures what serving costs a replica by running the engine: rounds by batch, with and without drafts; prompts."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.core.sampling import SamplingParams
from outrider.engine.request import validate_request
from outrider.fleet.costs import RoundCost, ServingCosts
from outrider.llm import LLM
from outrider.loading.machine import speed_facts

PLAIN_TOKENS, DRAFTED_TOKENS = 16, 64
"""Of each answer while rounds are timed. With drafts they are longer: what is accepted changes as a text grows."""
PLAIN_PROMPTS, WAVES = 12, 3
"""Without drafts a batch answers the first so many prompts, which differ in length alone; with them all, which are
accepted differently. In either case so many times its own number, at least."""
REPEATS = 2
LONG = 512
"""Tokens of context at which what context costs is measured, where the model takes as many."""
PROMPT_SHARES = (16, 4, 2, 1)
"""Prompts are timed at a round's tokens divided by these."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What is generated while rounds are timed."""

    tokens: int
    max_draft: int | None
    """Tokens drafted in a round; None: as the controller drafts. Without drafts no answer ends early."""


PLAIN, DRAFTED = Answers(PLAIN_TOKENS, 0), Answers(DRAFTED_TOKENS, None)
Clock = Callable[[], float]
Tell = Callable[[str], None]
_CALLS = itertools.count()


def measure_costs(llm: LLM, prompts: Seq[Seq[int]], tell: Tell, clock: Clock = time.perf_counter) -> ServingCosts:
    """prompts: token ids of those that are served. clock: seconds, as they pass or of the processor.

    Every batch answers prompts as a server does: of different lengths at once, and each with its own drafts.
    """
    powers = [1 << i for i in range(llm.max_batch.bit_length())]
    between = [3 * each for each in powers]  # 3, 6, 12: kernels take rows in groups, and a line would miss the step
    batches = sorted({min(each, llm.max_batch) for each in (*powers, *between)})
    texts = [list(each) for each in prompts]
    time_rounds(llm, texts[:1], 1, PLAIN, clock)  # the first rounds pay for what later ones find ready
    plain: list[TimedRounds] = []
    drafted: list[TimedRounds] = []
    for batch in batches:
        tell(f"rounds of {batch}")
        plain.append(time_rounds(llm, texts, batch, PLAIN, clock))
        if llm.drafter.traits.max_tokens and (batch in powers or batch == llm.max_batch):
            drafted.append(time_rounds(llm, texts, batch, DRAFTED, clock))
    tell("prompts")
    long = min(LONG, llm.engine.target.context - PLAIN_TOKENS - 2)
    reads = [(n, time_reading(llm, texts, n, clock)) for n in _chunk_sizes(llm, long)]
    context = sum(each.context for each in plain) / len(plain)
    deep = time_rounds(llm, [_repeated(each, long) for each in texts[:4]], 1, PLAIN, clock)
    per_token = max(0.0, deep.seconds - plain[0].seconds) / max(1.0, deep.context - plain[0].context)
    per_token = min(per_token, *(0.5 * each.seconds / each.batch / each.context for each in (*plain, *drafted)))
    whole = time_reading(llm, texts, long, clock)
    return ServingCosts(
        tuple(each.at(context, per_token) for each in plain),
        tuple(each.at(context, per_token) for each in drafted),
        tuple(reads),
        context,
        per_token,
        _per_read_token(whole, reads, long),
        llm.max_batch,
        llm.max_round_tokens,
        llm.engine.target.pool.count * llm.engine.target.pool.size,
        f"{llm.loaded.name}, {llm.loaded.format} on {llm.engine.target.device}, drafter {llm.drafter.traits.name}",
        llm.drafter.traits.max_tokens,
    )


def kept_costs(llm: LLM, prompts: Seq[Seq[int]], folder: Path, tell: Tell) -> ServingCosts:
    """Those of an earlier start with the same model, machine, drafter and prompts; measured where there are none."""
    drafter = llm.drafter.traits
    facts = (*speed_facts(llm.loaded), drafter.name, drafter.loads, llm.max_batch, prompts, PLAIN, DRAFTED)
    file = folder / f"serving-{sha256(repr(facts).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return ServingCosts.from_json(json.loads(file.read_text(encoding="utf-8")))
    found = measure_costs(llm, prompts, tell)
    with suppress(OSError):  # where it cannot be written, they are measured again
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found.as_json()), encoding="utf-8")
    return found


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Means over the rounds of one batch."""

    batch: int
    seconds: float
    tokens: float
    """That a sequence gained."""
    context: float
    """Tokens before it."""

    def at(self, context: float, per_token: float) -> RoundCost:
        """As they would be with so much context."""
        return RoundCost(self.batch, self.seconds + self.batch * per_token * (context - self.context), self.tokens)


def time_rounds(llm: LLM, prompts: Seq[list[int]], batch: int, answers: Answers, clock: Clock) -> TimedRounds:
    """Answer the prompts, `batch` at a time, and time the rounds in which so many decode and none is read."""
    seconds, rounds, gained, context = 0.0, 0, 0, 0.0
    count = len(prompts) if answers.max_draft is None else min(PLAIN_PROMPTS, len(prompts))
    given = [prompts[i % len(prompts)] for i in range(max(count, WAVES * batch))]
    with _running(llm, given, batch, answers) as loop:
        while loop.live:
            full, before = len(loop.live) == batch and not loop.reading, sum(map(loop.length, loop.live))
            began = clock()
            tokens = loop.step()
            if full:
                seconds += clock() - began
                rounds, gained, context = rounds + (tokens > 0), gained + tokens, context + before * (tokens > 0)
    sequences = max(1, rounds) * batch
    return TimedRounds(batch, seconds / max(1, rounds), gained / sequences, context / sequences)


def time_reading(llm: LLM, prompts: Seq[list[int]], tokens: int, clock: Clock) -> float:
    """Seconds of reading a prompt of so many tokens, up to its first one; the mean of a few."""
    seconds = 0.0
    for repeat in range(REPEATS):
        prompt = _repeated(prompts[repeat % len(prompts)], tokens)
        with _running(llm, [prompt], 1, PLAIN) as loop:
            began = clock()
            while loop.reading:
                loop.step()
            seconds += clock() - began
    return seconds / REPEATS


class AnswerLoop:
    """Prompts that are answered so many at a time, the next as one ends."""

    def __init__(self, llm: LLM, prompts: Seq[list[int]], batch: int, answers: Answers) -> None:
        self.llm, self.answers, self.waiting = llm, answers, deque(prompts)
        self.salt = f"fleet {next(_CALLS)}"  # a drafter that remembers answers has not seen these
        self.live: dict[int, list[int]] = {}
        """By sequence: its prompt's tokens, and those of its answer."""
        self.reading: set[int] = set()
        """Sequences without a token so far."""
        for _ in range(batch):
            self._submit()

    def step(self) -> int:
        """Run a round; the tokens it brought."""
        tokens = 0
        for event in self.llm.engine.step():
            tokens += len(event.tokens)
            self.live[event.seq_id][1] += len(event.tokens)
            self.reading.discard(event.seq_id)
            if event.finish is not None:
                del self.live[event.seq_id]
                self._submit()
        return tokens

    def length(self, seq_id: int) -> int:
        return sum(self.live[seq_id])

    def _submit(self) -> None:
        if not self.waiting:
            return
        prompt, answers = self.waiting.popleft(), self.answers
        room = self.llm.engine.target.context - len(prompt)
        params = SamplingParams(max_tokens=min(answers.tokens, room), ignore_eos=answers.max_draft == 0)
        request = self.llm.request(prompt, params, max_draft=answers.max_draft, salt=self.salt)
        (seq_id,) = self.llm.engine.submit(validate_request(request, self.llm.engine.target))
        self.live[seq_id] = [len(prompt), 0]
        self.reading.add(seq_id)


@contextmanager
def _running(llm: LLM, prompts: Seq[list[int]], batch: int, answers: Answers) -> Iterator[AnswerLoop]:
    """Within, these prompts are answered; what is left is cancelled."""
    loop = AnswerLoop(llm, prompts, batch, answers)
    try:
        yield loop
    finally:
        for seq_id in loop.live:
            if llm.engine.alive(seq_id):
                llm.engine.cancel(seq_id)


def _chunk_sizes(llm: LLM, most: int) -> list[int]:
    return sorted({max(1, min(most, llm.max_round_tokens) // share) for share in PROMPT_SHARES})


def _per_read_token(whole: float, reads: Seq[tuple[int, float]], tokens: int) -> float:
    """What a token of context adds to reading one: a long prompt against its chunks without context."""
    size, alone = reads[-1]
    starts = range(0, tokens, size)
    pairs = sum(min(size, tokens - start) * start for start in starts)
    return max(0.0, whole - alone * tokens / size) / pairs if pairs else 0.0


def _repeated(prompt: Seq[int], count: int) -> list[int]:
    """A prompt repeated to so many tokens."""
    return (list(prompt) * -(-count // len(prompt)))[:count]
