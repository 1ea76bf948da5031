"""Tables of a generation's statistics: speed, acceptance, and the time of each part of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from outrider.engine.results import Comparison
    from outrider.engine.stats import Stats, Tally

SHOWN_POSITIONS = 6

Row = tuple[str, str, str]
"""A statistic's name, its value, and its meaning."""


def stats_table(stats: Stats, seed: int | None = None) -> Table:
    """The statistics of one text. seed: the one drawn for it."""
    drawn = [] if seed is None else [("seed", str(seed), "drawn; --seed with the same options gives the same text")]
    return _table([_speed_row("tok/s", stats), *_draft_rows(stats), *_time_rows(stats), *drawn])


def comparison_table(both: Comparison, mode: str) -> Table:
    """The statistics of the same request, plain and speculative."""
    speculative = both.speculative.stats
    return _table(
        [
            _speed_row("tok/s plain", both.plain.stats),
            _speed_row("tok/s speculative", speculative),
            ("speed-up", f"{both.speedup:.2f}x", "of decoding; prefill takes the same time"),
            *_draft_rows(speculative),
            *_time_rows(speculative),
            _identical_row(both, mode),
        ]
    )


def add_prompt_row(table: Table, prompt_format: Literal["chat", "raw"], *, has_template: bool) -> None:
    """Say whether the prompt was written out by the chat template."""
    why = "completed as it is" if has_template else "completed as it is: the model has no chat template"
    note = "a user message, by the model's chat template; --raw completes the text" if prompt_format == "chat" else why
    table.add_row(Text("prompt"), Text(prompt_format), Text(note))


def _speed_row(name: str, stats: Stats) -> Row:
    first = max(0.0, stats.first - stats.started)
    note = f"{_count(stats.tokens, 'token')} in {stats.seconds:.1f} s, the first after {first:.1f} s"
    return (name, f"{stats.decode_tokens_per_second:.1f}", note)


def _draft_rows(stats: Stats) -> list[Row]:
    """The rows on acceptance: α, γ, τ, the share of accepted tokens, and α of each drafter."""
    from outrider.engine.stats import meaning  # brings torch, which --help can do without

    tally = stats.all
    judged = tally.accepted + tally.rejected
    if not tally.drafted:
        return [("α", "-", "nothing was drafted")]
    return [
        ("α", f"{tally.alpha:.2f}", f"chance that a draft token is accepted: {meaning(tally.alpha, judged)}"),
        ("γ", f"{tally.gamma:.2f}", "draft tokens a round"),
        ("τ measured", f"{tally.tau:.2f}", "tokens a target pass, its own included"),
        ("τ by formula", f"{tally.tau_formula:.2f}", "from α and the draft lengths"),
        _accepted_row(tally),
        *_per_drafter(stats),
    ]


def _accepted_row(tally: Tally) -> Row:
    """The share of draft tokens that were accepted, also by position in the draft."""
    shares = [f"{share:.2f}" for share in tally.acceptance_by_position]
    more = f" ... ({len(shares)})" if len(shares) > SHOWN_POSITIONS else ""
    note = f"of draft tokens; by position {' '.join(shares[:SHOWN_POSITIONS])}{more}"
    return ("accepted", f"{tally.accepted / tally.drafted:.2f}", note)


def _per_drafter(stats: Stats) -> list[Row]:
    """A row for each drafter, where several were used."""
    if len(stats.drafters) < 2:
        return []
    return [
        (f"  {name}", f"{tally.alpha:.2f}", f"α of its own; τ {tally.tau:.2f} over {_count(tally.rounds, 'round')}")
        for name, tally in stats.drafters.items()
    ]


def _time_rows(stats: Stats) -> list[Row]:
    """The row of the mean times of a round's parts."""
    times = stats.times
    draft, verify, host = (1000 * each / max(1, times.rounds) for each in (times.draft, times.verify, times.host))
    note = f"draft {draft:.2f}, verify {verify:.1f}, host {host:.2f}; prefill took {times.read:.2f} s"
    return [("ms a round", f"{draft + verify + host:.1f}", note)]


def _identical_row(both: Comparison, mode: str) -> Row:
    where = both.first_difference
    if where is None:
        return ("identical", "yes", "the same tokens as plain decoding")
    why = "; mode distribution keeps the distribution, not the text" if mode == "distribution" else ""
    return ("identical", "no", f"first difference at token {where}{why}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    for name, value, note in rows:
        table.add_row(Text(name), Text(value), Text(note))
    return table
