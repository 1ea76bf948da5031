"""A forecast as an HTML page."""

from __future__ import annotations

from pathlib import Path

from outrider.plan.estimate import ModelMemory
from outrider.plan.forecast import Forecast
from outrider.report.numbers import count, memory
from outrider.report.page import Html, Section, code, note, page, table, verdict
from outrider.report.plot import Bars, Line, Mark, line_plot, stacked_bars

KINDS = ("weights", "tables", "buffers", "graphs", "prompt", "logits")
MEANINGS = {
    "weights": "as they are held on the device",
    "tables": "rotations of positions, block tables, a head's outputs",
    "buffers": "activations and logits of captured passes",
    "graphs": "captured passes",
    "prompt": "activations of the longest chunk of a prompt",
    "logits": "logits alive at once, and what sampling makes of them",
}


def summary(plan: Forecast) -> str:
    """The answer in a sentence."""
    where = f"{memory(plan.memory)} of {'CUDA' if plan.device == 'cuda' else 'host'} memory"
    if not plan.fits:
        return f"Does not fit in {where}: {plan.problem}."
    return (
        f"Fits in {where}: {memory(plan.at_start)} in use at start, {memory(plan.peak)} at most, with a cache of "
        f"{count(plan.tokens)} tokens {_sharing(plan)}."
    )


def _sharing(plan: Forecast) -> str:
    """The words on how sequences share the cache. A sequence is never longer than the cache."""
    longest = count(min(plan.context, plan.tokens))
    if plan.max_batch == 1:
        return f"for one sequence of up to {longest}"
    if plan.tokens >= plan.max_batch * plan.context:
        return f"for {plan.max_batch} sequences of up to {longest}"
    return f"that at most {plan.max_batch} sequences share, each of up to {longest}"


def advice(plan: Forecast) -> str:
    """What to do next: a command where it fits, else what would make it fit."""
    if plan.fits:
        return f"outrider serve {plan.target} --drafter {plan.drafter} --max-batch {plan.max_batch}"
    smaller = [fit for fit in plan.largest if fit.batch <= plan.max_batch]
    if smaller:
        fit = smaller[-1]
        return f"{fit.batch} sequences of {fit.context} tokens fit: --max-batch {fit.batch} --context {fit.context}"
    return "nothing fits: take a smaller or a quantized model, or a device with more memory"


def plan_page(plan: Forecast) -> str:
    """The whole file."""
    parts = [verdict(summary(plan), "good" if plan.fits else "bad"), code(advice(plan))]
    parts += [note(each) for each in plan.notes]
    per_token = [[label(m), memory(1024 * m.per_token)] for m in plan.models if m.per_token]
    sections = [
        Section("", parts),
        Section("In use at start", [_start_plot(plan), _parts_table(plan)]),
        Section("Caches", [table(["model", "per 1024 tokens"], per_token)]),
        Section("What fits", [_fit_plot(plan), _fit_table(plan), _draft(plan)]),
    ]
    return page(f"Memory of {plan.target} with {plan.drafter}", sections)


def label(model: ModelMemory) -> str:
    """A model's role and name; for an absolute path, only its last part."""
    return f"{model.role}: {Path(model.name).name if Path(model.name).is_absolute() else model.name}"


def largest_draft(plan: Forecast) -> str:
    """The size of the largest draft model that fits, as a sentence without its full stop."""
    if not plan.largest_draft:
        return "none fits beside this target and its cache"
    return f"{memory(plan.largest_draft)} of weights, if its cache is to its weights as the target's are"


def _start_plot(plan: Forecast) -> Html:
    names = ["all", *(label(model) for model in plan.models)]
    pad = [0] * len(plan.models)
    work = [m.workspace - m.transient for m in plan.models]
    passes = 0 if plan.device == "cpu" else max(m.transient for m in plan.models)
    bars = [
        Bars(plan.own_name, [plan.own, *pad]),
        Bars("weights", [sum(m.weights for m in plan.models), *(m.weights for m in plan.models)]),
        Bars("cache", [plan.cache, *(plan.tokens * m.per_token for m in plan.models)]),
        Bars("workspace", [sum(work) + passes, *work]),
    ]
    limit = Mark(f"memory: {memory(plan.memory)}", x=plan.memory)
    return stacked_bars("memory in use at start", names, bars, show=memory, limit=limit)


def _parts_table(plan: Forecast) -> Html:
    head = ["", *(label(model) for model in plan.models), ""]
    values = {kind: [int(getattr(model, kind)) for model in plan.models] for kind in KINDS}
    rows = [[kind, *map(memory, values[kind]), MEANINGS[kind]] for kind in KINDS if any(values[kind])]
    caches = [memory(plan.tokens * model.per_token) for model in plan.models]
    rows.append(["cache", *caches, f"{count(plan.tokens)} tokens"])
    return table(head, rows, told=True)


def _fit_plot(plan: Forecast) -> Html:
    points = [(float(fit.batch), float(fit.context)) for fit in plan.largest]
    return line_plot(
        "longest context by batch", [Line("context", points)], across="sequences at once", log=True, zero=True
    )


def _fit_table(plan: Forecast) -> Html:
    rows = [[count(fit.batch), count(fit.context), count(fit.batch * fit.context)] for fit in plan.largest]
    return table(["sequences at once", "longest context", "tokens in all"], rows)


def _draft(plan: Forecast) -> Html:
    return note(f"The largest draft model: {largest_draft(plan)}.")
