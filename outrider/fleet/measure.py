"""Measures what serving costs a replica by running the engine: rounds by batch, with and without drafts; prompts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from outrider.core.sampling import SamplingParams
from outrider.engine.request import validate_request
from outrider.fleet.costs import RoundCost, ServingCosts
from outrider.llm import LLM
from outrider.loading.machine import speed_facts

MAX_ROUNDS = 64
"""Of one batch that are timed."""
REPEATS = 2
LONG = 512
"""Tokens of context at which what context costs is measured, where the model takes as many."""
PROMPT_SHARES = (16, 4, 2, 1)
"""Prompts are timed at a round's tokens divided by these."""
Clock = Callable[[], float]
Tell = Callable[[str], None]
_CALLS = itertools.count()


def measure_costs(llm: LLM, prompts: Seq[Seq[int]], tell: Tell, clock: Clock = time.perf_counter) -> ServingCosts:
    """prompts: token ids of those that are served. clock: seconds, as they pass or of the processor."""
    batches = sorted({min(1 << i, llm.max_batch) for i in range(llm.max_batch.bit_length())} | {llm.max_batch})
    texts = [list(each) for each in prompts]
    with _running(llm, texts[:1], 0) as step:  # the first rounds pay for what later ones find ready
        for _ in range(4):
            step()
    mean = sum(map(len, texts)) // len(texts)
    alike = [_repeated(each, mean) for each in texts]
    plain: list[RoundCost] = []
    speculative: list[RoundCost] = []
    for batch in batches:
        tell(f"rounds of {batch}")
        plain.append(_rounds(llm, alike, batch, clock))
        if llm.drafter.traits.max_tokens:
            speculative.append(_drafting_rounds(llm, texts, batch, clock))
    tell("prompts")
    long = min(LONG, llm.engine.target.context - MAX_ROUNDS - 2)
    reads = [(n, _reading(llm, texts, n, clock)) for n in _chunk_sizes(llm, long)]
    context = mean + MAX_ROUNDS / 2
    deep = _rounds(llm, [_repeated(texts[0], long)], 1, clock)
    per_token = max(0.0, deep.seconds - plain[0].seconds) / max(1.0, long + MAX_ROUNDS / 2 - context)
    per_token = min(per_token, min(0.5 * each.seconds / each.batch / context for each in (*plain, *speculative)))
    whole = _reading(llm, texts, long, clock)
    return ServingCosts(
        tuple(plain),
        tuple(speculative),
        tuple(reads),
        context,
        per_token,
        _per_read_token(whole, reads, long),
        llm.max_batch,
        llm.max_round_tokens,
        llm.engine.target.pool.count * llm.engine.target.pool.size,
        f"{llm.loaded.name}, {llm.loaded.format} on {llm.engine.target.device}, drafter {llm.drafter.traits.name}",
    )


def kept_costs(llm: LLM, prompts: Seq[Seq[int]], folder: Path, tell: Tell) -> ServingCosts:
    """Those of an earlier start with the same model, machine, drafter and prompts; measured where there are none."""
    facts = (*speed_facts(llm.loaded), llm.drafter.traits.name, llm.drafter.traits.loads, llm.max_batch, prompts)
    file = folder / f"serving-{sha256(repr(facts).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return ServingCosts.from_json(json.loads(file.read_text(encoding="utf-8")))
    found = measure_costs(llm, prompts, tell)
    with suppress(OSError):  # where it cannot be written, they are measured again
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found.as_json()), encoding="utf-8")
    return found


def _rounds(llm: LLM, prompts: Seq[list[int]], batch: int, clock: Clock) -> RoundCost:
    """Without drafts: the fastest of a few measurements, since other work on a machine only makes them slower."""
    made = [_time_rounds(llm, prompts, batch, 0, clock) for _ in range(REPEATS)]
    return RoundCost(batch, min(seconds / rounds for seconds, rounds, _ in made), 1.0)


def _drafting_rounds(llm: LLM, prompts: Seq[list[int]], batch: int, clock: Clock) -> RoundCost:
    """As the controller drafts, the mean over as many prompts as MAX_ROUNDS take, each until an answer ends."""
    seconds, rounds, tokens = 0.0, 0, 0
    for begin in range(0, len(prompts), batch):
        group = [prompts[(begin + i) % len(prompts)] for i in range(batch)]
        took, count, gained = _time_rounds(llm, group, batch, None, clock)
        seconds, rounds, tokens = seconds + took, rounds + count, tokens + gained
        if rounds >= MAX_ROUNDS:
            break
    return RoundCost(batch, seconds / rounds, tokens / rounds / batch)


def _time_rounds(
    llm: LLM, prompts: Seq[list[int]], batch: int, max_draft: int | None, clock: Clock
) -> tuple[float, int, int]:
    """Seconds, rounds and tokens in which all sequences decode, until one ends. Without drafts none does."""
    group = [prompts[i % len(prompts)] for i in range(batch)]
    tokens = rounds = 0
    with _running(llm, group, max_draft) as step:
        reading = set(range(batch))
        while reading:
            reading -= {place for place, _, _ in step()}
        began = now = clock()
        while rounds < MAX_ROUNDS:
            events = step()
            if not events:
                continue
            rounds, tokens, now = rounds + 1, tokens + sum(count for _, count, _ in events), clock()
            if any(ended for _, _, ended in events):
                break
    return now - began, max(1, rounds), tokens


def _reading(llm: LLM, prompts: Seq[list[int]], tokens: int, clock: Clock) -> float:
    """Seconds of reading a prompt of so many tokens, up to its first one; the fastest of a few."""
    found: list[float] = []
    for repeat in range(REPEATS):
        prompt = _repeated(prompts[repeat % len(prompts)], tokens)
        with _running(llm, [prompt], 0) as step:
            began = clock()
            while not step():
                pass
            found.append(clock() - began)
    return min(found)


@contextmanager
def _running(
    llm: LLM, prompts: Seq[list[int]], max_draft: int | None
) -> Iterator[Callable[[], list[tuple[int, int, bool]]]]:
    """Within, these prompts are answered: a function that runs a round and tells (place, tokens, ended) of each."""
    salt = f"fleet {next(_CALLS)}"  # a drafter that remembers answers has not seen these
    room = llm.engine.target.context
    places: dict[int, int] = {}
    for place, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=min(4 * MAX_ROUNDS, room - len(prompt)), ignore_eos=max_draft == 0)
        request = llm.request(prompt, params, max_draft=max_draft, salt=salt)
        (seq_id,) = llm.engine.submit(validate_request(request, llm.engine.target))
        places[seq_id] = place

    def step() -> list[tuple[int, int, bool]]:
        events = [(each, places[each.seq_id]) for each in llm.engine.step()]
        return [(place, len(each.tokens), each.finish is not None) for each, place in events]

    try:
        yield step
    finally:
        for seq_id in places:
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
