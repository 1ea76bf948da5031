"""Checks a pair of models, given by names, and makes a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.check.findings import Finding, Report
from outrider.check.heads import HeadSide, check_head, open_head_side
from outrider.check.models import check_licences, check_model
from outrider.check.sides import Side, open_side
from outrider.check.smoke import RunOptions, smoke_test
from outrider.checkpoints.folder import gguf_of
from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError, FetchError
from outrider.models.heads.files import open_head
from outrider.models.load import EMBEDDING_NAME
from outrider.plan.facts import ModelFacts, read_facts
from outrider.plan.forecast import PlanOptions, make_forecast
from outrider.report.numbers import memory


def check_pair(target: str, draft: str, options: RunOptions, *, smoke: bool = True, progress: Any = None) -> Report:
    """Report whether a draft model or a drafting head can draft for a target. FetchError where one cannot be fetched.

    smoke: also load both and let them draft for a few seconds, unless an earlier finding refuses the pair.
    """
    report, context = _compare(target, draft, progress)
    if context:
        report = replace(report, options=("--context", str(context)))
        options = replace(options, context=context)
    if report.has("refuse"):
        return report
    report = _memory(report, options)
    if smoke and not report.has("refuse"):
        found, tried = smoke_test(target, report.drafter, options, progress)
        report = replace(report, findings=[*report.findings, *found], smoke=tried)
    return report


def _compare(target: str, draft: str, progress: Any) -> tuple[Report, int]:
    """The report before anything is loaded, and the context that the pair needs; 0: the target's own."""
    report = Report(target=target, draft=draft, kind="draft-model", drafter=f"draft-model:model={draft}", findings=[])
    try:
        facts, folder = _open(target, progress)
        ours = open_side(facts, folder)
    except FetchError:
        raise
    except ConfigError as error:
        return replace(report, findings=[_unreadable("target", error)]), 0
    try:
        facts, folder = _open(draft, progress)
        head = _head_of(facts, folder, same=folder == ours.folder)
        if head is not None:
            spec = f"{head.drafter}:model={draft}"
            findings = [*check_head(ours, head), *check_licences(ours.facts, facts)]
            return replace(report, kind=head.held, drafter=spec, findings=findings), 0
        theirs = open_side(facts, folder)
    except FetchError:
        raise
    except ConfigError as error:
        return replace(report, findings=[_unreadable("draft", error)]), 0
    return _compare_models(report, ours, theirs)


def _compare_models(report: Report, target: Side, draft: Side) -> tuple[Report, int]:
    findings, context = check_model(target, draft)
    report = replace(report, findings=findings)
    if report.has("cross"):
        return replace(report, drafter=f"cross-model:model={draft.name}"), 0  # it reads what its context holds
    return report, context


def _open(name: str, progress: Any) -> tuple[ModelFacts, Path]:
    folder = resolve(name, progress=progress)
    facts = read_facts(str(folder))
    return replace(facts, name=name, folder=folder), folder


def _head_of(facts: ModelFacts, folder: Path, *, same: bool) -> HeadSide | None:
    """The head in a checkpoint; None where it holds none. An MTP module counts where the checkpoint holds no whole
    model, or is the target's own. same: whether it is that."""
    if gguf_of(folder) is not None:
        return None
    files = open_head(str(folder))
    if files.mtp is not None and EMBEDDING_NAME in facts.tensors and not same:
        return None
    return open_head_side(facts.name, files)


def _unreadable(which: str, error: ConfigError) -> Finding:
    part = "tokenizer" if "tokenizer" in str(error) else "files"
    code = part if which == "draft" else f"{which}-{part}"
    what, _, fix = str(error).rpartition("; ")  # messages end with a fix
    consequence = f"the {which} cannot be loaded"
    if not what:
        return Finding(code, "refuse", fix, consequence, "mend it, or download it again")
    return Finding(code, "refuse", what, consequence, fix)


def _memory(report: Report, options: RunOptions) -> Report:
    """The report with a finding on whether both models fit on the device, and the options that they need to fit."""
    asked = PlanOptions(device=options.device, dtype=options.dtype, quantize=options.quantize, context=options.context)
    plan = make_forecast(report.target, report.drafter, asked)
    needed: tuple[str, ...] = ()
    if plan.fits:
        what = f"both fit: {memory(plan.at_start)} of {memory(plan.memory)}"
        found = Finding("memory", "ok", what)
    elif not plan.largest:
        fix = "take a smaller draft, or a device with more memory"
        found = Finding("memory", "refuse", plan.problem, "the pair does not fit on the device", fix)
    else:
        fit = plan.largest[0]
        needed = ("--max-batch", str(fit.batch), "--context", str(min(fit.context, plan.context)))
        fix = f"serve with {' '.join(needed)}; `outrider plan` tells what else fits"
        found = Finding("memory", "option", plan.problem, "the pair does not fit with the usual limits", fix)
    return replace(report, findings=[*report.findings, found], options=needed or report.options)
