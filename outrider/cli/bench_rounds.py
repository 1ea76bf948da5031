"""`outrider bench rounds`: where the time of a round goes, with and without drafts, and a profile of it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from outrider.cli.options import (
    DraftingOptions,
    ModelOptions,
    RuntimeOptions,
    argument,
    build_llm,
    check_ranges,
    engine_options,
    option,
)
from outrider.cli.screen import Screen, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.measure import Measurement
    from outrider.bench.profile import Cost, Profile
    from outrider.core.sampling import SamplingParams
    from outrider.llm import LLM

SYNTHETIC = "synthetic"
PROMPT = "Explain, step by step, how a steam engine turns heat into motion, and why the diesel engine replaced it."
SHOWN_COSTS = 16
NAME_CELLS = 70
WARM_UP_ROUNDS = 4
MAX_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsOptions:
    """Measurement."""

    name: str = argument("demo", "Folder, Hugging Face id, .gguf file, or synthetic[:SHAPE]", metavar="MODEL")
    batch: int = option(1, "Sequences at once")
    prompt: str | None = option(None, "The prompt (a built-in one)", metavar="TEXT")
    max_tokens: int = option(128, "New tokens of each sequence")
    profile: bool = option(False, "Kernels, gaps and waits of a round")
    rounds: int = option(10, "Rounds profiled")
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        # at least 2, since the first token is not timed
        check_ranges(self, batch=(1, 1024), max_tokens=(2, 1 << 20), rounds=(1, 1000))


def rounds(options: RoundsOptions, drafting: DraftingOptions, runtime: RuntimeOptions) -> None:
    """Measure the rounds of plain and speculative decoding on one prompt, or profile them.

    `synthetic` has the shape of a real model with random weights, and a draft of its first layers:
    times are real, text is not. Shapes: llama-8b, llama-1b, smollm2-135m, qwen-1.5b, tiny.
    Without --drafter, that draft model drafts for it, and suffix for all others.
    """
    screen = Screen()
    name, model = options.name, ModelOptions(model=options.name, max_batch=options.batch, **asdict(runtime))
    if name.partition(":")[0] == SYNTHETIC:
        llm, prompts = _synthetic(options, drafting, model)
    else:
        with progress_bars(screen.notes) as progress:
            llm = build_llm(model, drafting, progress)
        prompts = [llm.tokenizer.encode(f"{options.prompt or PROMPT} ({i + 1})") for i in range(options.batch)]
    if options.profile:
        found = _profile(llm, prompts, options.rounds)
        output, tables = {"model": name} | found.as_dict(), _profile_tables(found)
    else:
        plain, speculative = _measure_both(llm, prompts, options.max_tokens)
        output = {"model": name, "device": str(llm.loaded.target.device)} | _comparison(plain, speculative)
        tables = [_bench_table(plain, speculative)]
    if options.json:
        sys.stdout.write(json.dumps(output, allow_nan=False) + "\n")
        return
    for table in tables:
        screen.out.print(table)


def _synthetic(options: RoundsOptions, drafting: DraftingOptions, model: ModelOptions) -> tuple[LLM, list[list[int]]]:
    """An LLM over a synthetic pair, and random prompts. Without --drafter, the pair's draft model drafts."""
    from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
    from outrider.bench.measure import random_prompts
    from outrider.loading.load import LoadOptions, choose_context, choose_device, choose_dtype
    from outrider.testing.synthetic import EOS, synthetic_pair

    if options.prompt is not None:
        raise ConfigError("--prompt: a synthetic model gets random tokens; leave it out, or name another model")
    if model.quantize not in ("auto", "none"):
        raise ConfigError(f"--quantize {model.quantize} packs a model from disk; a synthetic one has float weights")
    given = LoadOptions(context=model.context, cache_tokens=model.cache_tokens, threads=model.threads)
    shape = model.model.partition(":")[2] or "tiny"
    pair = synthetic_pair(shape, device=choose_device(model.device), dtype=choose_dtype(model.dtype))
    own = pair.target.config.max_positions
    length = min(256, own // 4)
    enough = min(length + max(options.max_tokens, 4096), own)
    context = choose_context(enough if given.context is None else given.context, own, model.model)
    tokens = options.batch * context if given.cache_tokens is None else given.cache_tokens
    factory = LLMFactory(pair, cache_tokens=tokens, context=context, pinned=model.pinned, threads=model.threads)
    no_drafter = drafting.drafter is None and drafting.speculative_config is None
    llm = factory.llm(DRAFT_MODEL if no_drafter else drafting.config(), **engine_options(drafting, model))
    return llm, random_prompts(options.batch, length, pair.target.config.vocab_size, first=EOS + 1)


def _measure_both(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[Measurement, Measurement]:
    """Complete the prompts without drafts, then with, each after a warm-up. ConfigError for too few max_tokens."""
    from outrider.bench.measure import measure
    from outrider.core.sampling import SamplingParams

    found: list[Measurement] = []
    for name, max_draft in (("plain", 0), ("speculative", None)):
        for kind, tokens in (("warm-up", min(MAX_WARM_UP_TOKENS, max_tokens)), ("timed", max_tokens)):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            salt = f"bench {name} {kind}"
            last = measure(llm.engine, prompts, params, salt=salt, max_draft=max_draft, to_end=True)
        if not last.rounds:
            raise ConfigError(
                f"--max-tokens {max_tokens}: with {name} decoding a sequence finishes before all {len(prompts)} decode "
                f"together, so that nothing is measured; try {4 * max_tokens}"
            )
        found.append(last)
    return found[0], found[1]


def _profile(llm: LLM, prompts: list[list[int]], rounds: int) -> Profile:
    """Profile decoding rounds, after a warm-up of the same rounds."""
    from outrider.bench.profile import profile_rounds
    from outrider.core.sampling import SamplingParams

    needed = (3 * rounds + WARM_UP_ROUNDS + 2) * (llm.drafter.traits.max_tokens + 1)
    room = llm.loaded.target.context - max(map(len, prompts))
    if needed > room:
        high = (room // (llm.drafter.traits.max_tokens + 1) - WARM_UP_ROUNDS - 2) // 3
        raise ConfigError(f"--rounds {rounds} may take {needed} tokens and the context leaves {room}; at most {high}")
    params = SamplingParams(max_tokens=needed, ignore_eos=True)
    _start_decoding(llm, prompts, params, "profile warm-up", 3 * rounds)
    ids = _start_decoding(llm, prompts, params, "profile", 0, keep=True)
    found = profile_rounds(llm.engine, rounds)
    for seq_id in ids:
        llm.engine.cancel(seq_id)
    return found


def _start_decoding(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str, rounds: int, *, keep: bool = False
) -> list[int]:
    """Prefill the prompts and run WARM_UP_ROUNDS + `rounds` rounds. Returns the sequences' ids. keep: leave them
    running; otherwise they are cancelled."""
    engine = llm.engine
    ids = [engine.submit(llm.request(prompt, params, salt=f"{salt} {i}"))[0] for i, prompt in enumerate(prompts)]
    waiting = set(ids)
    while waiting:
        waiting -= {event.seq_id for event in engine.step() if event.tokens}
    for _ in range(WARM_UP_ROUNDS + rounds):
        engine.step()
    for seq_id in () if keep else ids:
        engine.cancel(seq_id)
    return ids


def _figures(found: Measurement) -> dict[str, float]:
    draft, verify, host = found.split_ms()
    return {
        "tokens_per_second": found.rate,
        "whole_tokens_per_second": found.total_rate,
        "tau": found.tau,
        "alpha": found.alpha,
        "gamma": found.gamma,
        "round_ms": found.round_ms,
        "draft_ms": draft,
        "verify_ms": verify,
        "host_ms": host,
    }


def _comparison(plain: Measurement, speculative: Measurement) -> dict[str, Any]:
    pairs = list(zip(plain.texts, speculative.texts, strict=True))
    return {
        "batch": plain.batch,
        "plain": _figures(plain),
        "speculative": _figures(speculative),
        "speedup": speculative.rate / plain.rate if plain.rate else 0.0,
        "identical": sum(one == other for one, other in pairs) / len(pairs),
    }


ROWS = {
    "tokens_per_second": ("tok/s", "while all sequences decode, as below"),
    "whole_tokens_per_second": ("tok/s, whole", "to the end, prefill included"),
    "tau": ("τ", "tokens a sequence a round, at most γ + 1"),
    "alpha": ("α", "chance that a draft token is accepted"),
    "gamma": ("γ", "draft tokens a sequence a round"),
    "round_ms": ("ms a round", "draft + verify + host"),
    "draft_ms": ("  draft", "drafting"),
    "verify_ms": ("  verify", "the target's pass and verification"),
    "host_ms": ("  host", "the rest: scheduling, text, statistics"),
}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """The figures rounded to two decimals, such that the parts of a round still add up."""
    out = {name: round(value, 2) for name, value in figures.items()}
    return out | {"host_ms": out["round_ms"] - out["draft_ms"] - out["verify_ms"]}


def _bench_table(plain: Measurement, speculative: Measurement) -> Table:
    output = _comparison(plain, speculative)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("plain", "speculative"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    columns = [_rounded(output[name]) for name in ("plain", "speculative")]
    for key, (name, meaning) in ROWS.items():
        plain_cell = "" if key in ("alpha", "gamma") else f"{columns[0][key]:.2f}"
        table.add_row(name, plain_cell, f"{columns[1][key]:.2f}", meaning)
    table.add_row("speed-up", "", f"{output['speedup']:.2f}x", f"batch {plain.batch}, greedy")
    same = round(output["identical"] * plain.batch)
    table.add_row("identical", "", f"{same} of {plain.batch}", "texts equal to plain decoding's")
    return table


def _profile_tables(found: Profile) -> list[Table]:
    what = "operators" if found.device == "cpu" else "kernels"
    top = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    busy = "in operators" if found.device == "cpu" else "device busy"
    rows = [
        (f"{found.round_ms:.3f} ms", f"a round, {found.tokens:.1f} tokens; on {found.device}, mean of {found.rounds}"),
        (f"{found.profiled_ms:.3f} ms", "the same under the profiler, as all below"),
        (f"{found.busy_ms:.3f} ms", busy),
        (f"{found.idle_ms:.3f} ms", "Python" if found.device == "cpu" else "device idle"),
        (f"{sum(c.count for c in found.costs):.0f}", f"{what}, {found.launches:.0f} launches"),
        (f"{sum(found.waits.values()):.1f}", "waits for the device"),
    ]
    for cells in rows:
        top.add_row(*map(Text, cells))
    tables = [top, _cost_table(what, found.costs)]
    tables += [_cost_table(name, costs) for name, costs in (("copies", found.copies), ("calls", found.calls)) if costs]
    if found.gaps:
        gaps = Table(title="longest gaps", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in ("µs", "after", "before"):
            gaps.add_column(heading, overflow="ellipsis", no_wrap=True)
        for gap in found.gaps:
            gaps.add_row(f"{gap.us:.1f}", Text(gap.after[:NAME_CELLS]), Text(gap.before[:NAME_CELLS]))
        tables.append(gaps)
    if found.waits:
        waits = Table(
            title="the host waits at", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
        )
        for where, count in found.waits.items():
            waits.add_row(f"{count:.1f}", Text(where))
        tables.append(waits)
    return tables


def _cost_table(name: str, costs: list[Cost]) -> Table:
    table = Table(title=f"{name} of a round", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("count", "µs", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("name", no_wrap=True, overflow="ellipsis")
    for cost in costs[:SHOWN_COSTS]:
        table.add_row(f"{cost.count:.1f}", f"{cost.us:.1f}", f"{100 * cost.share:.1f}%", Text(cost.name[:NAME_CELLS]))
    if rest := costs[SHOWN_COSTS:]:
        us, share = sum(c.us for c in rest), sum(c.share for c in rest)
        count = sum(c.count for c in rest)
        table.add_row(f"{count:.1f}", f"{us:.1f}", f"{100 * share:.1f}%", f"{len(rest)} others")
    return table
