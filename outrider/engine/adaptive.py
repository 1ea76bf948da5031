"""Makes the controller of a target and its drafter, from measured times."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.control.ceilings import limits_of
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.measure import key_of, load_table, measure_drafts, measure_passes, save_table
from outrider.control.member import Member
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.drafters.base import Drafter, included_in
from outrider.runners.base import Runner

MEASURE_SECONDS = 1.0
"""No further pass is timed after this many seconds; all captured passes on a GPU take about as long."""
TELLING_BATCH = 8
"""Where passes are not captured, a head's drafts are timed for one sequence and for this many."""


class CostMeter:
    """Times the passes of a target and its drafters, or takes the times of an earlier start."""

    def __init__(self, target: Runner, max_batch: int, folder: Path | None, facts: Seq[object]) -> None:
        """folder: where times are kept, for machines and models of the same `facts`; None: nowhere."""
        self.target, self.max_batch, self._folder, self._facts = target, max_batch, folder, facts

    def row_price(self, width: int) -> float | None:
        """What a further row of a pass costs; None where passes are captured, which happens after drafters are made."""
        return None if self.target.asynchronous else self._table(self.target, width, "target").row_price

    def controller(self, drafter: Drafter) -> Controller | None:
        """A controller for this drafter; None where nothing is ever drafted."""
        if drafter.traits.max_tokens < 1:
            return None
        target, parts = self.target, drafter.parts or (drafter,)
        width = 1 + drafter.traits.max_tokens
        tables = {part.traits.name: self._draft_table(part) for part in parts if part.traits.runs_model}
        known = {name: table for name, table in tables.items() if table is not None}
        made = OverlappedCosts if target.asynchronous else RoundCosts
        costs = made(self._table(target, width, "target"), known)
        costs.limits = limits_of(target, self._folder, self._facts)
        widths = sorted({w for _, w in target.pass_shapes(self.max_batch, width)}) if target.asynchronous else ()
        return Controller([member_of(part, target, parts) for part in parts], costs, widths)

    def _table(self, runner: Runner, width: int, *what: object) -> PassTable:
        """The times of a model's passes, those of an earlier start if there are any. what: names the model."""
        shapes, packed = runner.pass_shapes(self.max_batch, width), runner.packed_shapes(self.max_batch, width)
        key = key_of(*self._facts, *what, runner.device, shapes, packed)
        return self._kept(key, runner) or self._keep(key, measure_passes(runner, shapes, packed, MEASURE_SECONDS))

    def _draft_table(self, drafter: Drafter) -> PassTable | None:
        """The times for one draft token: of a pass of a draft model, or of a head's draft, divided by its tokens."""
        what = drafter.traits.name, *drafter.traits.loads
        if drafter.step_model is not None:
            return self._table(drafter.step_model, 1, *what)
        target, tokens = self.target, drafter.lengths[0] if drafter.lengths else 1
        shapes = {batch for batch, _ in target.pass_shapes(self.max_batch, 1)}
        batches = sorted({1, *shapes, min(self.max_batch, TELLING_BATCH)})
        key = key_of(*self._facts, *what, target.device, batches, tokens)
        known = self._kept(key, target)
        table = known or measure_drafts(target, drafter.rehearse, batches, tokens, MEASURE_SECONDS)
        return table if table is known or table is None else self._keep(key, table)

    def _kept(self, key: str, runner: Runner) -> PassTable | None:
        return None if self._folder is None else load_table(self._folder, key, runner)

    def _keep(self, key: str, table: PassTable) -> PassTable:
        if self._folder is not None:
            save_table(self._folder, key, table)
        return table


def member_of(drafter: Drafter, target: Runner, parts: Seq[Drafter] = ()) -> Member:
    """A drafter as a controller knows it. parts: all drafters that the controller chooses from."""
    traits = drafter.traits
    pays = traits.pays_budget and target.asynchronous
    return Member(
        traits.name,
        traits.max_tokens,
        traits.runs_model,
        pays,
        drafter.lengths,
        traits.limits_itself and pays,
        traits.shares and pays,
        included_in(drafter, parts),
    )
