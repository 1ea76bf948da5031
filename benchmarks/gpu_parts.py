"""The parts of benchmarks/gpu.py: each measures one thing and adds its rows as they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpu_frame import Bench, Row, clock_ms, median_ms, replays, replays_within, row_of
from gpu_others import small as small_model
from gpu_others import start, transformers

from outrider import SamplingParams
from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
from outrider.bench.measure import Measurement, measure
from outrider.bench.syncs import SyncCounter
from outrider.core.draft import Draft
from outrider.core.sequence import Span
from outrider.drafters.reduced_vocab import RECENT_SHARE
from outrider.runners.base import ChainStart
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import rare_tokens, synthetic_pair, weight_bytes

SPEC = f"{DRAFT_MODEL},k=5"
REDUCED_VOCAB = 32_768
REDUCED_VOCAB_BATCHES = (1, 8, 32)
WAIT_ROUNDS = 12
ALONE = 1 << 30  # a sequence id outside any engine
SMALL_TARGET, SMALL_DRAFT = "qwen-1.5b", "qwen-0.5b"
CHAINS = (1, 9)  # tokens of the chains whose difference is the time of a draft step


def decode(
    bench: Bench, factory: LLMFactory, drafter: str, batch: int, prompt: int, new: int, *, share: bool = False
) -> Measurement:
    """Warm up, then time the same prompts again with cold caches (share: prompts may be found in the cache).

    Engine and drafter are fresh each time, so that nothing is known of the text; captured graphs stay.
    """
    prompts = bench.prompts(batch, prompt)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    salt = bench.salt()
    for _ in range(2):
        llm = factory.llm(drafter, max_batch=batch, max_round_tokens=max(2048, batch * 64))
        found = measure(llm.engine, prompts, params, salt=salt)
        salt = salt if share else bench.salt()
    return found


def decode_rows(bench: Bench, section: str, drafters: dict[str, str]) -> None:
    plan = bench.plan
    for batch in plan.batches:
        for name, spec in drafters.items():
            bench.check_time()
            found = decode(bench, bench.factory, spec, batch, plan.prompt, plan.new)
            bench.add(row_of(bench, section, name, found, plan.prompt))


def plain(bench: Bench) -> None:
    decode_rows(bench, "plain", {"plain": "none"})


def spec(bench: Bench) -> None:
    decode_rows(bench, "spec", {"draft-model k=5": SPEC})
    reduced_vocab(bench)


def reduced_vocab(bench: Bench) -> None:
    """A draft model with a vocabulary of 32768 tokens. The same pair, its other tokens made rare: 2 % of the output.

    Prompts are random and fill the places of recently seen tokens; the rest are the frequent ones.
    """
    plan, draft = bench.plan, bench.pair.draft
    left_out = max(0, draft.config.vocab_size - REDUCED_VOCAB) * draft.config.hidden_size * draft.dtype.itemsize
    with rare_tokens(bench.pair, REDUCED_VOCAB - REDUCED_VOCAB // RECENT_SHARE):
        for batch in (size for size in plan.batches if size in REDUCED_VOCAB_BATCHES):
            bench.check_time()
            found = decode(bench, bench.factory, f"{SPEC},vocab={REDUCED_VOCAB}", batch, plan.prompt, plan.new)
            row = row_of(bench, "spec", f"draft-model k=5, vocab={REDUCED_VOCAB}", found, plan.prompt)
            reduced_steps = max(0.0, found.gamma - 1)  # a chain's first token is by the whole head
            unread = 1000 * reduced_steps * left_out / bench.bandwidth
            row.of_limit = (row.of_limit or 0.0) - unread / found.round_ms
            bench.add(row)


def drafters(bench: Bench) -> None:
    decode_rows(bench, "drafters", {name: name for name in ("suffix", "prompt-lookup", "mix")})


def context(bench: Bench) -> None:
    """Batch 1 at each length; prompts are prefilled once."""
    plan = bench.plan
    for length in plan.contexts:
        for name, how in (("plain", "none"), ("draft-model k=5", SPEC)):
            bench.check_time()
            found = decode(bench, bench.factory, how, 1, length, min(plan.new, 96), share=True)
            bench.add(row_of(bench, "context", name, found, length))


# --- one pass ---------------------------------------------------------------------------------


def waits(bench: Bench) -> None:
    """Blocking synchronisations a round while a batch decodes. None where there is no CUDA."""
    plan = bench.plan
    for name, how in (("plain", "none"), ("draft-model k=5", SPEC)):
        bench.check_time()
        llm = bench.factory.llm(how)
        params = SamplingParams(max_tokens=12 * WAIT_ROUNDS, ignore_eos=True)
        llm.engine.submit(llm.request(bench.prompts(1, plan.prompt)[0], params, salt=bench.salt()))
        for _ in range(4):
            llm.engine.step()
        with SyncCounter() as waited:
            for _ in range(WAIT_ROUNDS):
                llm.engine.step()
        while llm.engine.busy:
            llm.engine.step()
        bench.waited.update(waited.where)
        row = Row(section="waits", name=f"waits a round, {name}", context=plan.prompt)
        row.waits = waited.count / WAIT_ROUNDS if plan.device.type == "cuda" else None
        row.note = ", ".join(f"{where} ({n / WAIT_ROUNDS:.1f})" for where, n in waited.where.most_common())
        bench.add(row)


def graphs(bench: Bench) -> None:
    """What the device does in a round: the graphs it replays, each timed alone. Drafting overlaps with nothing then."""
    plan = bench.plan
    for batch in plan.batches:
        for name, how in (("plain", "none"), ("draft-model k=5", SPEC)):
            bench.check_time()
            llm = bench.factory.llm(how, max_batch=batch, max_round_tokens=batch * plan.prompt)
            params = SamplingParams(max_tokens=plan.new, ignore_eos=True)
            for ids in bench.prompts(batch, plan.prompt):
                llm.engine.submit(llm.request(ids, params, salt=bench.salt()))
            for _ in range(3):
                llm.engine.step()
            with replays() as seen, replays_within(bench.factory.draft.target, "draft_chains", seen) as drafted:
                llm.engine.step()
            times = {id(graph): median_ms(graph.replay, plan.device, 10) for graph in seen}
            for seq_id in range(batch):
                llm.engine.cancel(seq_id)
            row = Row(section="graphs", name=f"graphs of a round, {name}", batch=batch, context=plan.prompt)
            if seen:
                row.draft_ms = sum(times[id(graph)] for graph in drafted)
                row.round_ms = sum(times[id(graph)] for graph in seen)
                row.verify_ms = row.round_ms - row.draft_ms
            row.note = f"{len(drafted)} of {len(seen)} replays draft" if seen else "nothing is captured here"
            bench.add(row)


def widths(bench: Bench) -> None:
    """score() of one sequence with drafts of each width, and the captured graph alone."""
    plan, target = bench.plan, bench.factory.target.target
    text = tuple(bench.prompts(1, plan.prompt)[0])
    target.pool.open(ALONE, text, "widths")
    target.pool.reserve(ALONE, plan.prompt + max(plan.widths) + 1)
    target.score([Span(ALONE, 0, text)])
    try:
        for width in plan.widths:
            bench.check_time()
            span = Span(ALONE, len(text) - 1, text[-1:], Draft(text[: width - 1]))
            target.score([span])
            with replays() as graphs:
                target.score([span])
            whole = clock_ms(lambda s=span: target.score([s]), plan.device)
            alone = sum(median_ms(graph.replay, plan.device) for graph in graphs)
            note = f"graph alone {alone:.3f} ms" if graphs else "no captured graph"
            row = Row(section="widths", name=f"score, {width} rows", context=plan.prompt, verify_ms=whole, note=note)
            row.round_ms = alone or whole
            row.of_limit = bench.limit_ms(1, plan.prompt) / row.round_ms
            bench.add(row)
    finally:
        target.release(ALONE, unpublish=True)


# --- small models -----------------------------------------------------------------------------


def small(bench: Bench) -> None:
    """A real small model against Transformers; then shapes whose launches cost as much time as their weights."""
    small_model(bench)
    bench.check_time()
    small_plain(bench)
    draft_step(bench)


def small_plain(bench: Bench) -> None:
    plan = bench.plan
    shape = "tiny" if plan.shape == "tiny" else SMALL_TARGET
    pair = synthetic_pair(shape, device=plan.device)
    tokens = plan.prompt + plan.new + 64
    found = decode(bench, LLMFactory(pair, cache_tokens=tokens, context=tokens), "none", 1, plan.prompt, plan.new)
    row = row_of(bench, "small", f"plain, {shape}", found, plan.prompt)
    cached = (plan.prompt + found.tokens / 2) * pair.target.config.token_bytes(pair.target.dtype)
    read = weight_bytes(pair.target) + cached
    row.of_limit = 1000 * read / bench.bandwidth / found.round_ms
    bench.add(row)


def draft_step(bench: Bench) -> None:
    """One step of a chain of a draft model: its pass, the token sampled, and what it leaves for the next."""
    plan = bench.plan
    shape = "tiny" if plan.shape == "tiny" else SMALL_DRAFT
    decoder = synthetic_pair(shape, device=plan.device).target
    runner = NativeRunner(decoder, plan.prompt + 64, context=plan.prompt + 64)
    text = tuple(bench.prompts(1, plan.prompt)[0])
    runner.pool.open(ALONE, text, "steps")
    runner.pool.reserve(ALONE, plan.prompt + CHAINS[-1] + 1)
    runner.score([Span(ALONE, 0, text)])
    start, times = ChainStart(ALONE, 0, 0.0, len(text), text[-2:]), list[float]()
    for steps in CHAINS:
        with replays() as graphs:
            runner.draft_chains([start], steps)
        times += [median_ms(graph.replay, plan.device) for graph in graphs]
    row = Row(section="small", name=f"draft step, {shape}", context=plan.prompt)
    row.note = "nothing is captured here"
    if len(times) == len(CHAINS):
        row.round_ms = (times[1] - times[0]) / (CHAINS[1] - CHAINS[0])
        row.of_limit = 1000 * weight_bytes(decoder) / bench.bandwidth / row.round_ms
        row.note = f"chain of {CHAINS[0]} {times[0]:.3f} ms, of {CHAINS[1]} {times[1]:.3f} ms"
    bench.add(row)


# --- pinned -----------------------------------------------------------------------------------


def pinned(bench: Bench) -> None:
    """Texts with and without a draft, token for token, and what pinning costs. Off CUDA only the texts."""
    plan, on = bench.plan, bench.plan.device.type == "cuda"
    batch, prompts = min(8, plan.pinned_prompts), bench.prompts(plan.pinned_prompts, plan.prompt)
    tokens = batch * (plan.prompt + plan.new + 32)
    if on:
        factory = LLMFactory(bench.pair, cache_tokens=tokens, context=plan.prompt + plan.new + 16, pinned=True)
        for name, how in (("pinned plain", "none"), ("pinned draft-model k=5", SPEC)):
            bench.check_time()
            found = decode(bench, factory, how, 1, plan.prompt, plan.new)
            bench.add(row_of(bench, "pinned", name, found, plan.prompt))
        for temperature in (0.0, 1.0):
            for waves in (False, True):
                bench.check_time()
                if equal_row(bench, factory, prompts, temperature, batch, waves=waves, name="pinned") == 1.0:
                    break  # all queued is the harder case
    bench.check_time()
    equal_row(bench, bench.factory, prompts, 0.0, batch, waves=False, name="not pinned")


def equal_row(
    bench: Bench,
    factory: LLMFactory,
    prompts: list[list[int]],
    temperature: float,
    batch: int,
    *,
    waves: bool,
    name: str,
) -> float:
    """waves: a batch ends before the next begins, so that prompts are prefilled in the same batches every time."""
    params = SamplingParams(max_tokens=bench.plan.new, ignore_eos=True, temperature=temperature, seed=7)
    step = batch if waves else len(prompts)
    texts: dict[str, list[tuple[int, ...]]] = {}
    seconds: dict[str, float] = {}
    for how in ("none", SPEC):
        llm, began = factory.llm(how, max_batch=batch), time.perf_counter()
        texts[how] = []
        for first in range(0, len(prompts), step):
            part, salt = prompts[first : first + step], bench.salt()
            texts[how] += measure(llm.engine, part, params, salt=salt, to_end=True).texts
        seconds[how] = time.perf_counter() - began
    pairs = list(zip(texts["none"], texts[SPEC], strict=True))
    same = sum(one == other for one, other in pairs)
    tokens = sum(sum(a == b for a, b in zip(one, other, strict=True)) for one, other in pairs)
    count = sum(map(len, texts["none"]))
    how = f"{batch} at a time, {'in waves' if waves else 'all queued'}"
    note = f"{same} of {len(pairs)} texts equal, {tokens / count:.4f} of tokens in place; {how}"
    row = Row(
        section="pinned", name=f"{name}: equal to plain, T={temperature:g}", batch=batch, context=bench.plan.prompt
    )
    row.equal, row.note = same / len(pairs), note
    row.whole_tokens_per_second, row.seconds = count / seconds[SPEC], seconds["none"] + seconds[SPEC]
    bench.add(row)
    return row.equal


PARTS: dict[str, Callable[[Bench], None]] = {
    "plain": plain,
    "spec": spec,
    "widths": widths,
    "waits": waits,
    "graphs": graphs,
    "transformers": transformers,
    "pinned": pinned,
    "small": small,
    "context": context,
    "start": start,
    "drafters": drafters,
}
"""The most important first."""
