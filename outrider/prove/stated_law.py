"""The law of the next token as a server states it: the most likely tokens, by their text, and all others together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.engine.text import UNFINISHED

REST = "\0rest"
"""Stands for all tokens that are not listed."""
MIN_REST = 1e-6
Law = dict[str, float]
Options = Mapping[str, float]


class UnknownLawError(Exception):
    """The law cannot be computed from what the server states."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a server states at one position."""

    top: Mapping[str, float]
    """Log-probabilities of the raw logits, by text."""
    listed: int
    """The number of tokens asked for. `top` has fewer where two tokens have the same text."""


def penalised(top: Mapping[str, float], output: Seq[str], options: Options) -> dict[str, float]:
    """Stated log-probabilities, minus the presence and frequency penalties for tokens of the output."""
    presence, frequency = options.get("presence_penalty", 0.0), options.get("frequency_penalty", 0.0)
    return {
        token: value - presence * (token in output) - frequency * list(output).count(token)
        for token, value in top.items()
    }


def stated_law(stated: Stated, output: Seq[str], options: Options, tolerance: float) -> Law | None:
    """The law after an output, by the tokens' texts; None where it does not follow from what is stated.

    Also None where some token is kept or left out by less than the tolerance, in log-probability or in mass.
    """
    try:
        law = _listed(stated, output, options)
        law = _top_k(law, int(options.get("top_k", 0)), tolerance)
        law = _temperature(law, options.get("temperature", 1.0))
        law = _top_p(law, options.get("top_p", 1.0), tolerance)
        return _min_p(law, options.get("min_p", 0.0), tolerance)
    except UnknownLawError:
        return None


def _listed(stated: Stated, output: Seq[str], options: Options) -> Law:
    """The law of the listed tokens after penalties. Tokens that a penalty puts below the lowest one join REST."""
    top = {token: value for token, value in stated.top.items() if UNFINISHED not in token}
    same_text = len(top) < len(stated.top)  # tokens that are parts of characters: several have this same text
    rest = max(0.0, 1 - math.fsum(map(math.exp, top.values())))
    changed = options.get("presence_penalty") or options.get("frequency_penalty")
    unlisted = bool(changed) and any(token not in top for token in output)
    if not top or (rest > MIN_REST and unlisted):
        raise UnknownLawError
    if rest > MIN_REST and (_leaves_out(options) if same_text else len(top) < stated.listed):
        raise UnknownLawError
    edge = min(top.values())
    law: Law = {}
    for token, value in penalised(top, output, options).items():
        if value >= edge or rest <= MIN_REST:
            law[token] = math.exp(value)
        else:
            rest += math.exp(value)
    return _normal(law, rest if rest > MIN_REST else 0.0)


def _leaves_out(options: Options) -> bool:
    """Whether the law depends on how probability is divided among the tokens that are not listed."""
    neutral = {"top_k": 0, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    return any(options.get(name, value) != value for name, value in neutral.items())


def _top_k(law: Law, count: int, tolerance: float) -> Law:
    order = _order(law)
    if not count or (len(order) <= count and REST not in law):
        return law
    if len(order) <= count or math.log(law[order[count - 1]] / law[order[count]]) <= tolerance:
        raise UnknownLawError
    return _normal({token: law[token] for token in order[:count]}, 0.0)


def _temperature(law: Law, temperature: float) -> Law:
    if temperature == 1:
        return law
    if REST in law:
        raise UnknownLawError
    return _normal({token: chance ** (1 / temperature) for token, chance in law.items()}, 0.0)


def _top_p(law: Law, mass: float, tolerance: float) -> Law:
    if mass == 1:
        return law
    kept: Law = {}
    for token in _order(law):
        if math.fsum(kept.values()) < mass:
            kept[token] = law[token]
        if abs(math.fsum(kept.values()) - mass) <= tolerance:
            raise UnknownLawError
    if math.fsum(kept.values()) < mass:
        raise UnknownLawError
    return _normal(kept, 0.0)


def _min_p(law: Law, share: float, tolerance: float) -> Law:
    order = _order(law)
    if not share:
        return law
    least = share * law[order[0]]
    if any(abs(math.log(law[token] / least)) <= tolerance for token in order):
        raise UnknownLawError
    if REST in law and law[order[-1]] >= least:
        raise UnknownLawError
    return _normal({token: law[token] for token in order if law[token] >= least}, 0.0)


def _order(law: Law) -> list[str]:
    """The listed tokens, the likeliest first."""
    return sorted((token for token in law if token != REST), key=lambda token: -law[token])


def _normal(law: Law, rest: float) -> Law:
    total = math.fsum(law.values()) + rest
    return {token: chance / total for token, chance in law.items()} | ({REST: rest / total} if rest else {})
