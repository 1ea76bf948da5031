"""Makes the controller of a target and its drafter, from measured times."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.control.controller import Controller, Member
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.measure import key_of, load_table, measure_passes, save_table
from outrider.drafters.base import Drafter
from outrider.runners.base import Runner

MEASURE_SECONDS = 1.0
"""No pass is timed after so long; on a GPU all that are captured take about as long."""


def make_controller(
    target: Runner, drafter: Drafter, *, max_batch: int, folder: Path | None = None, facts: Seq[object] = ()
) -> Controller | None:
    """A controller for this drafter; None where nothing is ever drafted.

    folder: where times are kept, for machines and models of the same `facts`.
    """
    if drafter.traits.max_tokens < 1:
        return None
    parts = drafter.parts or (drafter,)
    width = 1 + max(part.traits.max_tokens for part in parts)
    tables = {part.traits.name: part.step_model for part in parts if part.step_model is not None}
    costs = RoundCosts(
        _pass_table(target, max_batch, width, folder, (*facts, "target")),
        {name: _pass_table(model, max_batch, 1, folder, (*facts, name)) for name, model in tables.items()},
    )
    members = [
        Member(
            part.traits.name,
            part.traits.max_tokens,
            part.traits.runs_model,
            part.traits.pays_budget and target.asynchronous,
            part.lengths,
        )
        for part in parts
    ]
    widths = sorted({w for _, w in target.pass_shapes(max_batch, width)}) if target.asynchronous else ()
    return Controller(members, costs, widths)


def _pass_table(runner: Runner, batch: int, width: int, folder: Path | None, facts: Seq[object]) -> PassTable:
    shapes = runner.pass_shapes(batch, width)
    key = key_of(*facts, runner.device, shapes)
    known = load_table(folder, key, runner) if folder is not None else None
    if known is not None:
        return known
    table = measure_passes(runner, shapes, MEASURE_SECONDS)
    if folder is not None:
        save_table(folder, key, table)
    return table
