"""Measures the costs of serving by running the engine: rounds by batch, with and without drafts, and prompts."""

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
"""Tokens of each answer while rounds are timed. With drafts there are more: acceptance changes along a text."""
PLAIN_PROMPTS, WAVES = 12, 3
"""Without drafts a batch answers the first PLAIN_PROMPTS prompts, of which only the length matters; with drafts all of
them, since acceptance differs. In either case it answers at least WAVES prompts per sequence."""
REPEATS = 2
LONG = 512
"""Tokens of context at which the cost of context is measured, or as many as the model's context allows."""
PROMPT_SHARES = (16, 4, 2, 1)
"""Prompts are timed at the max tokens of a round divided by each of these."""


@dataclass(frozen=True, slots=True)
class Answers:
    """How answers are generated while rounds are timed."""

    tokens: int
    max_draft: int | None
    """Max tokens drafted a round; None: as the controller plans. With 0, answers ignore the end-of-text token."""


PLAIN, DRAFTED = Answers(PLAIN_TOKENS, 0), Answers(DRAFTED_TOKENS, None)
Clock = Callable[[], float]
Tell = Callable[[str], None]
_CALLS = itertools.count()


def measure_costs(llm: LLM, prompts: Seq[Seq[int]], tell: Tell, clock: Clock = time.perf_counter) -> ServingCosts:
    """Measure the costs of serving with this LLM. prompts: token ids of typical ones. clock: wall or processor seconds.

    Every batch answers prompts as a server does: of different lengths at once, and each with its own drafts.
    """
    powers = [1 << i for i in range(llm.max_batch.bit_length())]
    between = [3 * each for each in powers]  # 3, 6, 12: kernels take rows in groups, and a line would miss the step
    batches = sorted({min(each, llm.max_batch) for each in (*powers, *between)})
    texts = [list(each) for each in prompts]
    time_rounds(llm, texts[:1], 1, PLAIN, clock)  # warm-up: the first rounds include one-time costs
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
    """The costs kept from an earlier run with the same model, machine, drafter, batch and prompts; else measured."""
    drafter = llm.drafter.traits
    facts = (*speed_facts(llm.loaded), drafter.name, drafter.loads, llm.max_batch, prompts, PLAIN, DRAFTED)
    file = folder / f"serving-{sha256(repr(facts).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return ServingCosts.from_json(json.loads(file.read_text(encoding="utf-8")))
    found = measure_costs(llm, prompts, tell)
    with suppress(OSError):  # where the file cannot be written, a later run measures again
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found.as_json()), encoding="utf-8")
    return found


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Means over the timed rounds of one batch size."""

    batch: int
    seconds: float
    tokens: float
    """Tokens that each sequence gained in a round."""
    context: float
    """Tokens of each sequence before a round."""

    def at(self, context: float, per_token: float) -> RoundCost:
        """The cost of these rounds at this context. per_token: seconds that each token of context adds."""
        return RoundCost(self.batch, self.seconds + self.batch * per_token * (context - self.context), self.tokens)


def time_rounds(llm: LLM, prompts: Seq[list[int]], batch: int, answers: Answers, clock: Clock) -> TimedRounds:
    """Answer the prompts, `batch` at a time, and time the rounds in which so many decode and none prefills."""
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
    """Seconds of reading a prompt of so many tokens, up to the answer's first token; the mean of REPEATS runs."""
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
    """Answers prompts, `batch` at a time: as one answer ends, the next prompt is submitted."""

    def __init__(self, llm: LLM, prompts: Seq[list[int]], batch: int, answers: Answers) -> None:
        self.llm, self.answers, self.waiting = llm, answers, deque(prompts)
        self.salt = f"fleet {next(_CALLS)}"  # so that a drafter that remembers answers does not know these
        self.live: dict[int, list[int]] = {}
        """For each running sequence, the numbers of tokens of its prompt and of its answer so far."""
        self.reading: set[int] = set()
        """The sequences without a token of their answer so far."""
        for _ in range(batch):
            self._submit()

    def step(self) -> int:
        """Run a round. Returns the number of tokens it brought."""
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
    """A loop over these prompts. At the end of the block, sequences that still run are cancelled."""
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
    """Seconds that each token of context adds to reading a prompt token, from the time of a long prompt beyond that of
    its chunks without context. whole: seconds of the long prompt. tokens: its length."""
    size, alone = reads[-1]
    starts = range(0, tokens, size)
    pairs = sum(min(size, tokens - start) * start for start in starts)
    return max(0.0, whole - alone * tokens / size) / pairs if pairs else 0.0


def _repeated(prompt: Seq[int], count: int) -> list[int]:
    """The prompt repeated, and cut to `count` tokens."""
    return (list(prompt) * -(-count // len(prompt)))[:count]
