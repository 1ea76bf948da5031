"""Compares a server's texts token by token: speculation on and off, cache cold and hit, alone and batched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from outrider.prove.api import Api, ApiError, Body, Completion, ServerKind
from outrider.prove.checks import Check, Status
from outrider.prove.stated_law import penalised
from outrider.prove.texts import LOGPROB_TOLERANCE, TIE_FACTOR

_salts = count()
MAX_MOVED = 2.0
UNJUDGED = "the server states no log-probabilities that could tell a tie from a bug"


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test, the source of its plain texts, and its abilities."""

    api: Api
    plain: Api | None
    """The server of plain texts: another one, or the same one with `off`; None where neither exists."""
    off: Body
    kind: ServerKind
    listed: int
    """The number of alternatives that it lists at each token; 0: it states no log-probabilities."""
    echoes: bool
    """Whether it states the log-probabilities of a prompt's tokens."""
    batch: int


@dataclass(frozen=True, slots=True)
class RemoteCase:
    """One text to compare."""

    name: str
    prompt: str
    options: Body = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to generate a text: with speculation or without, with a prefix hit or not, batched or alone."""

    on: bool
    hit: bool
    batched: bool

    @property
    def name(self) -> str:
        return ", ".join(
            ("on" if self.on else "off", "batched" if self.batched else "alone", "prefix hit" if self.hit else "cold")
        )


def variants(server: Server) -> list[Variant]:
    """The variants that a server allows, in an order in which each prefix hit follows texts that fill the cache."""
    speculation = (False, True) if server.plain is not None else (True,)
    cold = (False, True) if server.kind.salt or server.kind.cold else (True,)
    return [Variant(on, hit, batched) for on in speculation for batched in (False, True) for hit in cold]


def run_variants(server: Server, cases: list[RemoteCase]) -> dict[Variant, list[Completion]]:
    """The texts of all cases in all variants."""
    found: dict[Variant, list[Completion]] = {}
    cache: Body = {}
    for variant in variants(server):
        api = server.api if variant.on or server.plain is None else server.plain
        if not variant.hit:
            cache = {server.kind.salt: f"prove {next(_salts)}"} if server.kind.salt else dict(server.kind.cold or {})
        elif not server.kind.salt:
            cache = {}
        more = cache | ({} if variant.on else server.off)
        bodies = [{"prompt": case.prompt} | case.options | more for case in cases]
        found[variant] = api.complete_together(bodies, server.batch if variant.batched else 1)
    return found


def check_texts(server: Server, cases: list[RemoteCase], rounding: float | None = None) -> Iterator[Check]:
    """A check for each case. Where `rounding` is None, a check comes first that measures it: how far log-probabilities
    move between variants without speculation, or with it where the server cannot turn it off."""
    found = run_variants(server, cases)
    names = list(found)
    reference = names[0]
    if rounding is None:
        rounding = max(
            (
                _moved(found[reference][i], found[v][i])
                for v in names[1:]
                if v.on == reference.on
                for i in range(len(cases))
            ),
            default=0.0,
        )
        yield Check(
            group="rounding",
            name="log-probabilities, alone, batched, cold and with prefix hits, without speculation",
            status="holds" if rounding <= MAX_MOVED else "fails",
            detail=f"differ by at most {rounding:.2g}; more than {MAX_MOVED:g} would be no rounding",
            figures={"rounding": rounding},
        )
    for i, case in enumerate(cases):
        others = {variant.name: found[variant][i] for variant in names[1:]}
        yield _check(server, case, found[reference][i], others, rounding)


def _check(
    server: Server, case: RemoteCase, plain: Completion, others: Mapping[str, Completion], rounding: float
) -> Check:
    apart: dict[str, tuple[Status, str]] = {}
    for name, other in others.items():
        difference = text_difference(plain, other, case.options, TIE_FACTOR * rounding + LOGPROB_TOLERANCE)
        if difference is not None:
            apart[name] = difference
    if server.echoes and (scored := scored_difference(server, case, plain, rounding)) is not None:
        apart["read as a prompt"] = scored
    order: tuple[Status, ...] = ("fails", "not checked", "tie", "holds")
    if server.plain is None and not server.echoes:
        apart["plain"] = ("not checked", "nothing to compare with: give --plain-url")
    found: set[Status] = {status for status, _ in apart.values()} or {"holds"}
    status = min(found, key=order.index)
    cached = max((other.cached for other in others.values()), default=0)
    same = f"{len(plain.tokens)} tokens the same in {1 + len(others)} ways, up to {cached} prompt tokens cached"
    return Check(
        group="texts",
        name=case.name,
        status=status,
        detail="; ".join(f"{name}: {detail}" for name, (_, detail) in apart.items()) or same,
        figures={"tokens": len(plain.tokens), "cached": cached, "differences": {n: d for n, (_, d) in apart.items()}},
    )


def text_difference(
    plain: Completion, other: Completion, options: Mapping[str, float], tolerance: float
) -> tuple[Status, str] | None:
    """The status and a description of a difference; None where text, end and (within tolerance) log-probabilities are
    the same."""
    if not plain.tokens:
        same = (plain.text, plain.finish) == (other.text, other.finish)
        return None if same else ("not checked", f"the texts differ, and {UNJUDGED}")
    shorter = min(len(plain.tokens), len(other.tokens))
    pairs = zip(plain.tokens, other.tokens, strict=False)
    at = next((i for i, (one, two) in enumerate(pairs) if one != two), shorter)
    moved = _moved(plain, other)
    if moved > tolerance:
        return "fails", f"a log-probability differs by {moved:.2g} before the texts do; tolerance {tolerance:.2g}"
    if at == shorter:
        if (plain.text, plain.finish) == (other.text, other.finish):
            return None
        return (
            "fails",
            f"the same tokens, and then ends {other.text[-20:]!r} ({other.finish}), not {plain.text[-20:]!r}",
        )
    scores = penalised(plain.top[at], plain.tokens[:at], options)
    best = sorted(scores.values(), reverse=True)
    gap = best[0] - best[1] if len(best) > 1 else 0.0
    lag = best[0] - min(scores.get(token, -1e9) for token in (plain.tokens[at], other.tokens[at]))
    word = "tie" if lag <= tolerance else "bug"
    said = f"token {at} is {other.tokens[at]!r}, not {plain.tokens[at]!r}; top-2 gap {gap:.2g}: {word}"
    return ("tie" if word == "tie" else "fails"), said


def scored_difference(
    server: Server, case: RemoteCase, plain: Completion, rounding: float
) -> tuple[Status, str] | None:
    """A failure where a token of a greedy text is not the best one when the text is read as a prompt; else None, also
    where this cannot be judged."""
    if case.options.get("temperature") or any("penalty" in name or name == "stop" for name in case.options):
        return None
    try:
        read = server.api.complete(case.prompt + plain.text, echo=True, max_tokens=1, logprobs=2, temperature=0)
    except ApiError:
        return None
    first = len(read.tokens) - 1 - len(plain.tokens)
    if first < 1 or read.tokens[first:-1] != plain.tokens:
        return None  # as a prompt, the text is split into other tokens
    for i, token in enumerate(plain.tokens):
        lag = max(read.top[first + i].values(), default=0.0) - read.logprobs[first + i]
        if lag > TIE_FACTOR * rounding + LOGPROB_TOLERANCE:
            return "fails", f"token {i} ({token!r}) is {lag:.2g} below the best one"
    return None


def _moved(one: Completion, other: Completion) -> float:
    """The largest difference of a log-probability before the first differing token."""
    most = 0.0
    for a, b, p, q in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False):
        if a != b:
            break
        most = max(most, abs(p - q))
    return most
