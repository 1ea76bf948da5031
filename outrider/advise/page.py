"""An advice as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.advise.advice import Advice, Verified
from outrider.advise.export import ENGINES, Choice, export_to
from outrider.advise.export import serve_command as serve
from outrider.advise.measured import Measured
from outrider.advise.remote import Counters
from outrider.core.errors import ConfigError
from outrider.report.numbers import memory, seconds, share, times
from outrider.report.page import Html, Section, code, note, page, paragraph, table, verdict
from outrider.report.plot import Bars, Line, Mark, line_plot, stacked_bars

NOTES = (
    "Acceptance is over all rounds: the share in which a token of that position was accepted. Tokens a pass (τ) count "
    "the target's own.",
    "Predicted: tokens a pass, times what a plain round takes, over what a round with drafts takes, from earlier runs. "
    "Measured: both kinds of decoding in turn on the same prompts, by the rounds in which all sequences of a batch "
    "decode; ± two standard errors.",
    "A length that varies is the controller's choice in each round. No more gain is counted on than tokens a pass.",
    "The best few were timed until their times were known to 5 %, or for 8 s; the others once.",
)


def summary(advice: Advice) -> str:
    """The verdict in a sentence."""
    if advice.chosen is None:
        return f"Do not speculate: {'; '.join(advice.reasons)}."
    return f"Use {advice.chosen.drafter}: {'; '.join(advice.reasons)}."


def chosen(advice: Advice) -> Choice | None:
    best = advice.chosen
    if best is None:
        return None
    found = advice.of(best.drafter)
    length = best.length or found.best_length(best.temperature, best.batch)
    return Choice(advice.target, best.drafter, length, advice.shipped)


def configurations(choice: Choice) -> list[tuple[str, str]]:
    """(engine, text) for each engine: its command and configuration, or why it has no such drafter."""
    return [("Outrider", serve(choice)), *((name, _exported(name, choice)[0]) for name in ENGINES)]


def _exported(name: str, choice: Choice) -> tuple[str, bool]:
    """(text, taken): the engine's command and configuration, or why it has no such drafter; whether it has one."""
    try:
        made = export_to(name, choice)
    except ConfigError as error:
        return str(error), False
    return f"{made.command}\n{made.config}".strip(), True


def _engine_parts(choice: Choice) -> list[Html]:
    parts = [paragraph("Outrider"), code(serve(choice))]
    for name in ENGINES:
        text, taken = _exported(name, choice)
        parts += [paragraph(name), code(text) if taken else note(text)]
    return parts


def verified_rows(advice: Advice) -> list[list[str]]:
    return [_verified_row(each) for each in advice.verified]


def samples(advice: Advice) -> str:
    """A sentence on the number of runs behind the measured speeds."""
    counts = sorted({each.repetitions for each in advice.verified})
    runs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "no"
    return f"Measured: {runs} runs of all prompts with drafts, and as many without."


def advice_page(advice: Advice) -> str:
    """The whole file."""
    choice = chosen(advice)
    head = [verdict(summary(advice), "fair" if choice is None else "good")]
    head += [code(serve(choice if choice else Choice(advice.target, "none", 0)))]
    if advice.memory:
        head.append(paragraph(f"Its weights take {memory(advice.memory)} on disk."))
    sections = [Section("", head)]
    columns = ["drafter", "length", "temperature", "batch", "predicted", "measured", "τ", "texts"]
    sections.append(Section("Verified by running", [table(columns, verified_rows(advice)), note(samples(advice))]))
    sections.append(Section("Measured", [*_plots(advice), *map(note, NOTES)]))
    sections.append(Section("Predicted speed-up", [_predictions(each) for each in advice.measured]))
    if advice.unfit:
        rows = [[name, why] for name, why in advice.unfit.items()]
        sections.append(Section("Do not fit", [table(["drafter", "why"], rows, text=True)]))
    if choice is not None:
        sections.append(Section("For each engine", _engine_parts(choice)))
    facts = [[name, value] for name, value in advice.facts.items()]
    sections.append(Section("Where this was measured", [table(["", ""], facts, text=True)]))
    return page(f"Speculative decoding for {advice.target}", sections)


def remote_page(counters: Counters, lines: Seq[str], url: str) -> str:
    """The page of an advice for a running server. lines: from `advise_remote`."""
    head, *rest = lines
    chances = Line("accepted", [(i + 1, each) for i, each in enumerate(counters.survival)])
    plot = [line_plot("Accepted by position", [chances], across="position in the draft", zero=True)]
    sections = [Section("", [verdict(head, "fair"), *map(paragraph, rest)])]
    sections += [Section("Counted", plot)] if counters.survival else []
    return page(f"Speculative decoding at {url}", sections)


def _verified_row(each: Verified) -> list[str]:
    length = "varies" if each.length is None else str(each.length)
    predicted = "" if each.predicted is None else times(each.predicted)
    same = "the same" if each.identical else "differ"
    place = [each.drafter, length, f"{each.temperature:g}", str(each.batch)]
    return [*place, predicted, f"{times(each.measured)} ± {each.error:.0%}", f"{each.tau:.2f}", same]


def _plots(advice: Advice) -> list[Html]:
    if not advice.measured:
        return []
    temperature = advice.measured[0].temperatures[0]
    batch = advice.measured[0].batches[0]
    even = [Mark("as fast as plain", y=1.0)]
    by_length = [
        Line(each.drafter, [(k, each.speedup(temperature, batch, k)) for k in each.choices()])
        for each in advice.measured
    ]
    by_batch = [
        Line(each.drafter, [(b, each.best_speedup(temperature, b)) for b in each.batches]) for each in advice.measured
    ]
    chances = [
        Line(each.drafter, [(i + 1, a) for i, a in enumerate(each.longest(temperature).accepted)])
        for each in advice.measured
    ]
    names = ["plain", *(each.drafter for each in advice.measured)]
    rounds = [advice.measured[0].rounds[temperature, batch, 0, 0]]
    rounds += [each.rounds[temperature, batch, 0, _timed(each, temperature, batch)] for each in advice.measured]
    parts = [Bars(name, [getattr(each, name) for each in rounds]) for name in ("draft", "verify", "host")]
    return [
        line_plot(f"Speed-up by length of drafts, batch {batch}", by_length, across="tokens of a draft", marks=even),
        line_plot("Speed-up by batch, best length", by_batch, across="sequences at once", marks=even, log=True),
        line_plot("Accepted by position", chances, across="position in the draft", zero=True),
        stacked_bars(f"Time of a round, batch {batch}", names, parts, show=seconds),
    ]


def _timed(each: Measured, temperature: float, batch: int) -> int:
    """The timed draft length nearest to the best one."""
    best = each.best_length(temperature, batch)
    return min((length for length in each.lengths if length), key=lambda length: abs(length - best))


def _predictions(each: Measured) -> Html:
    """The table of one drafter's predictions: a row for each temperature, a column for each batch and context."""
    places = [(batch, 0) for batch in each.batches] + [(1, context) for context in each.contexts if context]
    head = [each.drafter, "first accepted", *(f"batch {b}" + (f", {c} tokens" if c else "") for b, c in places)]
    rows = [
        [f"temperature {t:g}", share(each.longest(t).conditional[0])]
        + [f"{times(each.best_speedup(t, b, c))} with {each.best_length(t, b, c)}" for b, c in places]
        for t in each.temperatures
    ]
    return table(head, rows)
