"""From the lines of a run to its figures: each row of each cell against plain decoding in the same repetition."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from outrider.bench.engines import PLAIN
from outrider.bench.record import Line, RunFile
from outrider.bench.statistics import Estimate, median_estimate, ratio_estimate

ALL = "all"
"""The category of all categories together."""

DEFINITIONS = {
    "tok/s": "tokens of all answers over the time from the first submission to the last token, prompts included; a "
    "token is one id that was emitted, the end-of-text token included. Median of the repetitions",
    "decode tok/s": "of one sequence: tokens after those of its first round, over the time since",
    "speed-up": "tok/s over that of plain decoding in the same repetition. Median of the repetitions, and in brackets "
    "an interval for it between order statistics, which holds for any distribution; its level is stated",
    "identical": "texts of all repetitions that are equal, token by token, to the text of plain decoding",
    "limit": "time to read the target's weights once for every pass, at the measured bandwidth, over the time taken: 1 "
    "is the most that plain decoding could reach; reading caches and drafting are in the rest",
    "acceptance length": "1 + accepted / drafts: tokens of a round that had a draft, the bonus or recovered token "
    "included, as vLLM counts. Interval: bootstrap over the texts",
    "τ": "tokens of a round, rounds without a draft included; in brackets the lowest and the highest repetition, where "
    "they differ: under the controller, which decides by measured times",
    "α": "chance that a draft token is accepted, given that those before it were: accepted / (accepted + rejected)",
    "acceptance rate": "accepted / drafted: draft tokens behind a rejected one count as not accepted",
    "per position": "of all drafts: drafts accepted at least to this position, over all drafts, as vLLM counts",
    "per position, conditional": "drafts whose token at this position is accepted, over those in which it was judged: "
    "all before it were accepted, and the draft reached it",
    "first token": "seconds from submission to the first token. Median over all texts",
    "distinct bigrams": "distinct pairs of neighbouring tokens over all pairs, within each text: a low share is text "
    "that repeats itself, which is easy to draft",
    "energy": "joules over tokens, by the device's own counter, with whatever else ran on it",
}


@dataclass(frozen=True, slots=True)
class RowSummary:
    """The figures of one row of one cell; see DEFINITIONS."""

    cell: dict[str, Any]
    row: str
    repetitions: int
    texts: int
    """The number of texts in one repetition."""
    identical: int
    """Texts equal to plain decoding's, in the repetition that had the fewest."""
    tokens_per_second: Estimate
    decode_tokens_per_second: Estimate
    speedup: Estimate | None
    """None for plain decoding itself."""
    decode_speedup: Estimate | None
    limit_share: float | None
    acceptance_length: Estimate | None
    """None where nothing was drafted."""
    tokens_per_round: Estimate
    tau_range: tuple[float, float]
    """The lowest and the highest τ among the repetitions."""
    alpha: float | None
    acceptance_rate: float | None
    draft_length: float
    per_position_acceptance_rates: list[float]
    per_position_conditional_rates: list[float]
    time_to_first_token: float
    distinct_bigram_share: float
    joules_per_token: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(run: RunFile) -> list[RowSummary]:
    """Every row of every cell, then of all categories together where there are several.

    Rows of an interrupted run may have fewer repetitions than others; they are included.
    """
    lines = run.of("measure")
    summaries: list[RowSummary] = []
    for group in (lines, _all_categories(lines)):
        for cell in _distinct(line["cell"] for line in group):
            own = [line for line in group if line["cell"] == cell]
            plain = {line["repetition"]: line for line in own if line["row"] == PLAIN}
            rows = dict.fromkeys(line["row"] for line in own)
            summaries += [_summary(cell, row, [line for line in own if line["row"] == row], plain) for row in rows]
    return summaries


def _summary(cell: dict[str, Any], row: str, lines: Seq[Line], plain: dict[int, Line]) -> RowSummary:
    paired = [(line, plain[line["repetition"]]) for line in lines if line["repetition"] in plain and row != PLAIN]
    drafts, accepted = _per_text(lines, "drafts"), _per_text(lines, "accepted")
    count, drafted = sum(drafts), sum(line["drafted"] for line in lines)
    accepted_at, rejected_at = _positions(lines)
    judged = [a + r for a, r in zip(accepted_at, rejected_at, strict=True)]
    joules = [line["joules"] for line in lines]
    reading = [line["read_seconds"] / line["seconds"] for line in lines if line["read_seconds"] is not None]
    length = ratio_estimate([(d + a, d) for d, a in zip(drafts, accepted, strict=True)]) if count else None
    return RowSummary(
        cell=cell,
        row=row,
        repetitions=len(lines),
        texts=len(lines[0]["texts"]),
        identical=min(line["identical"] for line in lines),
        tokens_per_second=median_estimate([_rate(line) for line in lines]),
        decode_tokens_per_second=median_estimate([_decode_rate(line) for line in lines]),
        speedup=median_estimate([_rate(a) / _rate(b) for a, b in paired]) if paired else None,
        decode_speedup=_decode_speedup(paired),
        limit_share=median(reading) if reading else None,
        acceptance_length=length,
        tokens_per_round=ratio_estimate(
            list(zip(_per_text(lines, "lengths"), _per_text(lines, "rounds"), strict=True))
        ),
        tau_range=(min(map(_tau, lines)), max(map(_tau, lines))),
        alpha=sum(accepted) / sum(judged) if any(judged) else None,
        acceptance_rate=sum(accepted) / drafted if drafted else None,
        draft_length=drafted / count if count else 0.0,
        per_position_acceptance_rates=[each / count for each in accepted_at] if count else [],
        per_position_conditional_rates=[a / j for a, j in zip(accepted_at, judged, strict=True) if j],
        time_to_first_token=median([each for line in lines for each in line["first_token_seconds"]]),
        distinct_bigram_share=_share(lines, "distinct_bigrams", "bigrams"),
        joules_per_token=None if None in joules else sum(joules) / sum(line["tokens"] for line in lines),
    )


def _rate(line: Line) -> float:
    return line["tokens"] / line["seconds"]


def _tau(line: Line) -> float:
    return sum(line["lengths"]) / max(1, sum(line["rounds"]))


def _decode_rate(line: Line) -> float:
    """0 where every text ended with its first round."""
    return line["decode_tokens"] / line["decode_seconds"] if line["decode_seconds"] else 0.0


def _decode_speedup(paired: Seq[tuple[Line, Line]]) -> Estimate | None:
    ratios = [_decode_rate(a) / _decode_rate(b) for a, b in paired if _decode_rate(b)]
    return median_estimate(ratios) if ratios else None


def _share(lines: Seq[Line], part: str, whole: str) -> float:
    total = sum(line[whole] for line in lines)
    return sum(line[part] for line in lines) / total if total else 1.0


def _per_text(lines: Seq[Line], name: str) -> list[int]:
    """The sum over the repetitions, for each text."""
    return [sum(values) for values in zip(*(line[name] for line in lines), strict=True)]


def _positions(lines: Seq[Line]) -> tuple[list[int], list[int]]:
    """Accepted and rejected at each position that was judged in any draft."""
    both = [_added([line[name] for line in lines]) for name in ("accepted_at", "rejected_at")]
    judged = [i + 1 for counts in both for i, count in enumerate(counts) if count]
    longest = max(judged, default=0)
    accepted, rejected = ((counts + [0] * longest)[:longest] for counts in both)
    return accepted, rejected


def _added(lists: Seq[Seq[int]]) -> list[int]:
    out = [0] * max(map(len, lists), default=0)
    for each in lists:
        for i, count in enumerate(each):
            out[i] += count
    return out


def _distinct(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({tuple(cell.items()): cell for cell in cells}.values())


def _all_categories(lines: Seq[Line]) -> list[Line]:
    """The lines of the same row and repetition, added up over the categories that all rows have."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        rest = {**line["cell"], "category": ALL}
        groups.setdefault((tuple(rest.items()), line["row"], line["repetition"]), []).append(line)
    most = max(map(len, groups.values()), default=0)
    return [_merged(own) for own in groups.values() if len(own) == most and most > 1]


def _merged(lines: Seq[Line]) -> Line:
    out: Line = dict(lines[0]) | {"cell": {**lines[0]["cell"], "category": ALL}}
    for name, value in lines[0].items():
        values = [line[name] for line in lines]
        if name in ("part", "cell", "row", "repetition"):
            continue
        if name in ("accepted_at", "rejected_at"):
            out[name] = _added(values)
        elif isinstance(value, list):
            out[name] = [each for part in values for each in part]
        else:
            out[name] = None if None in values else sum(values)
    return out
