"""`outrider bench`: how fast a model decodes here, plain and speculative, and what a round is made of."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from outrider.cli.options import Drafting, Model, Placed, argument, build, engine_options, option
from outrider.cli.show import Screen, bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.measure import Measured
    from outrider.bench.profile import Cost, Profile
    from outrider.core.sampling import SamplingParams
    from outrider.llm import LLM

SYNTHETIC = "synthetic"
TEXT = "Explain, step by step, how a steam engine turns heat into motion, and why it lost to the diesel engine."
SHOWN_COSTS = 16
NAME_CELLS = 70
WARM_UP_ROUNDS = 4
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What is timed."""

    name: str = argument("demo", "Folder, Hugging Face id, .gguf file, or synthetic[:SHAPE]", metavar="MODEL")
    batch: int = option(1, "Texts at once")
    prompt: str | None = option(None, "What is asked (a question of ours)", metavar="TEXT")
    max_tokens: int = option(128, "New tokens of each text")
    profile: bool = option(False, "Kernels, gaps and waits of a round")
    rounds: int = option(10, "Rounds profiled")
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        # speed is that of the tokens after the first
        for name, least, most in (("batch", 1, 1024), ("max_tokens", 2, 1 << 20), ("rounds", 1, 1000)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"--{name.replace('_', '-')} must be {least} to {most}, got {getattr(self, name)}")


def bench(timed: Timed, drafting: Drafting, where: Placed) -> None:
    """Time a model here, plain and speculative, or profile its rounds.

    `synthetic` is the shape of a real model with random weights, and a draft of its first layers:
    time is real, text is not. Shapes: llama-8b, llama-1b, smollm2-135m, qwen-1.5b, tiny.
    """
    screen = Screen()
    name, model = timed.name, Model(model=timed.name, max_batch=timed.batch, **asdict(where))
    if name.partition(":")[0] == SYNTHETIC:
        llm, prompts = _synthetic(timed, drafting, model)
    else:
        with bars(screen.notes) as progress:
            llm = build(model, drafting, progress)
        prompts = [llm.tokenizer.encode(f"{timed.prompt or TEXT} ({i + 1})") for i in range(timed.batch)]
    if timed.profile:
        found = _profile(llm, prompts, timed.rounds)
        told, tables = {"model": name} | found.as_dict(), _profile_tables(found)
    else:
        plain, speculative = _both(llm, prompts, timed.max_tokens)
        told = {"model": name, "device": str(llm.loaded.target.device)} | _compared(plain, speculative)
        tables = [_side_by_side(plain, speculative)]
    if timed.json:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
        return
    for table in tables:
        screen.out.print(table)


def _synthetic(timed: Timed, drafting: Drafting, model: Model) -> tuple[LLM, list[list[int]]]:
    """An LLM over a synthetic pair, and random prompts. Without --drafter the pair's draft guesses."""
    from outrider.bench.measure import random_prompts
    from outrider.bench.rig import DRAFT_MODEL, Rig
    from outrider.loading.load import DTYPES, LoadOptions, choose_context, choose_device
    from outrider.testing.synthetic import EOS, synthetic_pair

    if timed.prompt is not None:
        raise ConfigError("--prompt: a synthetic model is asked random tokens; leave it out, or name another model")
    if model.quantize not in ("auto", "none"):
        raise ConfigError(f"--quantize {model.quantize} packs a model from disk; a synthetic one has float weights")
    if model.dtype not in ("auto", *DTYPES):
        raise ConfigError(f"no dtype called {model.dtype!r}; choose one of: auto, {', '.join(DTYPES)}")
    asked = LoadOptions(context=model.context, cache_tokens=model.cache_tokens)
    shape = model.model.partition(":")[2] or "tiny"
    pair = synthetic_pair(shape, device=choose_device(model.device), dtype=DTYPES.get(model.dtype))
    own = pair.target.config.max_positions
    length = min(256, own // 4)
    enough = min(length + max(timed.max_tokens, 4096), own)
    context = choose_context(enough if asked.context is None else asked.context, own, model.model)
    tokens = timed.batch * context if asked.cache_tokens is None else asked.cache_tokens
    rig = Rig(pair, cache_tokens=tokens, context=context, pinned=model.pinned)
    undecided = drafting.drafter is None and drafting.speculative_config is None
    llm = rig.llm(DRAFT_MODEL if undecided else drafting.config(), **engine_options(drafting, model))
    return llm, random_prompts(timed.batch, length, pair.target.config.vocab_size, first=EOS + 1)


def _both(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[Measured, Measured]:
    """The prompts answered without drafts, then with; each after a warm-up nobody sees."""
    from outrider.bench.measure import measure
    from outrider.core.sampling import SamplingParams

    found: list[Measured] = []
    for name, max_draft in (("plain", 0), ("speculative", None)):
        for kind, tokens in (("warm-up", min(WARM_UP_TOKENS, max_tokens)), ("timed", max_tokens)):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            salt = f"bench {name} {kind}"
            last = measure(llm.engine, prompts, params, salt=salt, max_draft=max_draft, to_end=True)
        found.append(last)
    return found[0], found[1]


def _profile(llm: LLM, prompts: list[list[int]], rounds: int) -> Profile:
    """Profile rounds in which every prompt has been read. The same rounds are gone through once before, unseen."""
    from outrider.bench.profile import profile_rounds
    from outrider.core.sampling import SamplingParams

    needed = (3 * rounds + WARM_UP_ROUNDS + 2) * (llm.drafter.traits.max_tokens + 1)
    room = llm.loaded.target.context - max(map(len, prompts))
    if needed > room:
        most = (room // (llm.drafter.traits.max_tokens + 1) - WARM_UP_ROUNDS - 2) // 3
        raise ConfigError(f"--rounds {rounds} may take {needed} tokens and the context leaves {room}; at most {most}")
    params = SamplingParams(max_tokens=needed, ignore_eos=True)
    _begin(llm, prompts, params, "profile warm-up", 3 * rounds)
    ids = _begin(llm, prompts, params, "profile", 0, leave=True)
    found = profile_rounds(llm.engine, rounds)
    for seq_id in ids:
        llm.engine.cancel(seq_id)
    return found


def _begin(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str, rounds: int, *, leave: bool = False
) -> list[int]:
    """Read the prompts and take a few rounds more; leave: the texts stay alive."""
    engine = llm.engine
    ids = [engine.submit(llm.request(prompt, params, salt=f"{salt} {i}"))[0] for i, prompt in enumerate(prompts)]
    silent = set(ids)
    while silent:
        silent -= {event.seq_id for event in engine.step() if event.tokens}
    for _ in range(WARM_UP_ROUNDS + rounds):
        engine.step()
    for seq_id in () if leave else ids:
        engine.cancel(seq_id)
    return ids


def _figures(found: Measured) -> dict[str, float]:
    draft, verify, rest = found.split_ms()
    tally = found.stats.all
    return {
        "tokens_per_second": found.rate,
        "whole_tokens_per_second": found.whole_rate,
        "tau": found.tau,
        "alpha": tally.alpha,
        "gamma": tally.gamma,
        "round_ms": found.round_ms,
        "draft_ms": draft,
        "verify_ms": verify,
        "host_ms": rest,
    }


def _compared(plain: Measured, speculative: Measured) -> dict[str, Any]:
    pairs = list(zip(plain.texts, speculative.texts, strict=True))
    return {
        "batch": plain.batch,
        "plain": _figures(plain),
        "speculative": _figures(speculative),
        "speedup": speculative.rate / plain.rate if plain.rate else 0.0,
        "identical": sum(one == other for one, other in pairs) / len(pairs),
    }


SAYS = {
    "tokens_per_second": ("tok/s", "while all texts decode"),
    "whole_tokens_per_second": ("tok/s, whole", "prompts included"),
    "tau": ("τ", "tokens a text a round"),
    "alpha": ("α", "chance that a drafted token stands"),
    "gamma": ("γ", "tokens drafted a round"),
    "round_ms": ("ms a round", ""),
    "draft_ms": ("  draft", "of which: guessing"),
    "verify_ms": ("  verify", "scoring and judging"),
    "host_ms": ("  host", "the rest"),
}


def _side_by_side(plain: Measured, speculative: Measured) -> Table:
    told = _compared(plain, speculative)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("plain", "speculative"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for key, (name, says) in SAYS.items():
        blank = key in ("alpha", "gamma", "draft_ms")
        table.add_row(name, "" if blank else f"{told['plain'][key]:.2f}", f"{told['speculative'][key]:.2f}", says)
    table.add_row("speed-up", "", f"{told['speedup']:.2f}x", f"batch {plain.batch}, greedy")
    same = round(told["identical"] * plain.batch)
    table.add_row("identical", "", f"{same} of {plain.batch}", "texts the same as plain decoding's")
    return table


def _profile_tables(found: Profile) -> list[Table]:
    what = "operators" if found.device == "cpu" else "kernels"
    top = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    busy = "in operators" if found.device == "cpu" else "device busy"
    rows = [
        (f"{found.round_ms:.3f} ms", f"a round, {found.tokens:.1f} tokens; on {found.device}, mean of {found.rounds}"),
        (f"{found.profiled_ms:.3f} ms", "the same under the profiler, which the rest is of"),
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
