"""The figures of a run as cells of a table: on the terminal, on a page, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outrider.bench.peers import PeerSummary
from outrider.bench.serve import LoadSummary
from outrider.bench.statistics import Estimate
from outrider.bench.summary import ALL, RowSummary
from outrider.report.numbers import digits, seconds, share

SURE = 0.9
"""The chance with which an interval must hold for a clear gain; 5 repetitions give it."""
COLUMNS = (
    "prompts",
    "row",
    "tok/s",
    "speed-up",
    "identical",
    "limit",
    "acc. length",
    "τ",
    "α",
    "decode tok/s",
    "first token",
    "bigrams",
    "J/token",
)
SERVE_COLUMNS = (
    "load",
    "speculation",
    "tok/s",
    "speed-up",
    "identical",
    "requests/s",
    "TTFT, median / p99",
    "TPOT",
    "E2E, p99",
    "cached",
    "acc. length",
    "failed",
)
PEER_COLUMNS = ("prompts", "engine", "tok/s", "over the best other", "identical", "first token", "")
NOT_TOLD = "not told"


def cells_of(row: RowSummary) -> list[str]:
    """One row, in the order of COLUMNS. A speed always stands beside its check and its share of the limit."""
    return [
        place_of(row.cell),
        row.row,
        digits(row.tokens_per_second.value),
        interval(row.speedup),
        f"{row.identical} of {row.texts}",
        NOT_TOLD if row.limit_share is None else f"{row.limit_share:.2f}",
        "" if row.acceptance_length is None else f"{row.acceptance_length.value:.2f}",
        _tau(row),
        "" if row.alpha is None else f"{row.alpha:.2f}",
        digits(row.decode_tokens_per_second.value),
        seconds(row.time_to_first_token),
        f"{row.distinct_bigram_share:.2f}",
        NOT_TOLD if row.joules_per_token is None else digits(row.joules_per_token),
    ]


def _tau(row: RowSummary) -> str:
    value, (low, high) = f"{row.tokens_per_round.value:.2f}", row.tau_range
    return value if low == high else f"{value} [{low:.2f}, {high:.2f}]"


def serve_cells(found: LoadSummary) -> list[str]:
    """One row, in the order of SERVE_COLUMNS."""
    first = f"{seconds(found.median_ttft_ms / 1e3)} / {seconds(found.p99_ttft_ms / 1e3)}"
    return [
        found.name,
        found.speculation,
        digits(found.output_throughput.value),
        interval(found.speedup),
        "" if found.identical is None else f"{found.identical[0]} of {found.identical[1]}",
        digits(found.request_throughput),
        first,
        seconds(found.median_tpot_ms / 1e3),
        seconds(found.p99_e2el_ms / 1e3),
        NOT_TOLD if found.prefix_hit_rate is None else share(found.prefix_hit_rate),
        "" if found.acceptance_length is None else f"{found.acceptance_length:.2f}",
        str(found.failed),
    ]


def peer_cells(found: PeerSummary) -> list[str]:
    """One row, in the order of PEER_COLUMNS."""
    return [
        found.category,
        found.system,
        digits(found.tokens_per_second.value),
        interval(found.ratio),
        f"{found.identical} of {found.texts}",
        NOT_TOLD if found.time_to_first_token is None else seconds(found.time_to_first_token),
        found.wins,
    ]


def place_of(cell: dict[str, Any]) -> str:
    """A cell in words: its category, and the settings that differ from the defaults."""
    parts = [cell["category"]]
    parts += [f"T {cell['temperature']:g}"] if cell["temperature"] else []
    parts += [f"batch {cell['batch']}"] if cell["batch"] != 1 else []
    parts += [f"{cell['context']} tokens"] if cell["context"] else []
    parts += [f"thinking {cell['thinking']}"] if cell["thinking"] else []
    return ", ".join(parts)


def fastest(rows: Seq[RowSummary]) -> list[tuple[str, bool]]:
    """For all prompts together, or each category: the fastest drafter in a sentence, and whether it clearly gains.

    Only rows whose texts equal plain decoding's count. Clearly: the interval of its speed-up lies above 1, and holds
    with a chance of at least SURE.
    """
    drafted = [(row, row.speedup) for row in rows if row.speedup is not None and row.identical == row.texts]
    drafted = [each for each in drafted if each[0].cell["category"] == ALL] or drafted
    found: list[tuple[str, bool]] = []
    for place in dict.fromkeys(place_of(row.cell) for row, _ in drafted):
        own = [each for each in drafted if place_of(each[0].cell) == place]
        best, ratio = max(own, key=lambda each: each[1].value)
        clear = ratio.low > 1 and ratio.level >= SURE
        gain = "a clear gain" if clear else "no certain gain" if ratio.value > 1 else "no gain"
        found.append((f"{place}: {best.row} is the fastest drafter, {interval(ratio)} x plain decoding, {gain}", clear))
    return found


def interval(found: Estimate | None) -> str:
    """1.52 [1.48, 1.57]; empty for None."""
    return "" if found is None else f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def markdown(head: Seq[str], rows: Seq[Seq[str]]) -> str:
    """A table in Markdown. In cells, bars and backslashes are escaped, and line ends become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
