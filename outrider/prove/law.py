"""The reference for the next token's probabilities: every sampling option in float64, one text at a time.

Written independently of `verify/probs.py`, which computes them for many rows at once and is checked against this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token


@dataclass(frozen=True, slots=True)
class Law:
    """The target's law after one text: the distribution of the next token."""

    probs: Tensor
    """float64 [vocab]."""
    scores: Tensor
    """Logits after every option but truncation, float64 [vocab]; divided by the temperature where there is one."""
    margin: float
    """How close the truncating options are to leaving out other tokens: the smallest distance, in score or in mass."""


def law_after(
    logits: Tensor, params: SamplingParams, prompt: Seq[Token], output: Seq[Token], stop_ids: frozenset[Token]
) -> Law:
    """The law of the token after prompt and output. logits: the target's own there, [vocab]. Greedy decoding
    gives the best token a probability of 1."""
    x = logits.detach().double().cpu().clone()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    _penalise(x, params, prompt, output)
    for processor in params.logits_processors:
        x = processor([*prompt, *output], x.float()).double()
    if params.allowed_token_ids is not None:
        kept = torch.full_like(x, -math.inf)
        allowed = list(params.allowed_token_ids)
        kept[allowed] = x[allowed]
        x = kept
    x[list(params.banned_token_ids)] = -math.inf
    if len(output) < params.min_tokens:
        x[[token for token in stop_ids if token < len(x)]] = -math.inf
    if params.greedy:
        probs = torch.zeros_like(x)
        probs[int(x.argmax())] = 1.0
        return Law(probs, x, math.inf)
    x = (x - x.max()) / params.temperature
    probs, margin = _truncated(x.softmax(-1), params)
    return Law(probs, x, margin)


def _penalise(x: Tensor, params: SamplingParams, prompt: Seq[Token], output: Seq[Token]) -> None:
    for token in {*prompt, *output} if params.repetition_penalty != 1 else ():
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)


def _truncated(probs: Tensor, params: SamplingParams) -> tuple[Tensor, float]:
    """(probs, margin) after top-k, top-p, min-p and typical-p, in this order, each on what the one before it leaves."""
    margins = [math.inf]
    if params.top_k:
        probs = _keep(probs, -probs.log(), params.top_k, margins)
    if params.top_p < 1:
        probs = _keep(probs, -probs.log(), _reaching(probs, -probs.log(), params.top_p, margins), margins)
    if params.min_p > 0:
        count = int((probs >= probs.max() * params.min_p).sum())
        edge = (probs / (probs.max() * params.min_p)).log().abs()
        margins.append(float(edge.min()))
        probs = _keep(probs, -probs.log(), count, margins)
    if params.typical_p < 1:
        information = -probs.log()
        entropy = torch.special.entr(probs).sum()
        distance = (information - entropy).abs()
        probs = _keep(probs, distance, _reaching(probs, distance, params.typical_p, margins), margins)
    return probs, min(margins)


def _reaching(probs: Tensor, order: Tensor, mass: float, margins: list[float]) -> int:
    """The smallest number of tokens, by rising `order`, that together reach this mass."""
    reached = probs[order.argsort()].cumsum(-1)
    margins.append(float((reached - mass).abs().min()))
    return int((reached < mass).sum()) + 1


def _keep(probs: Tensor, order: Tensor, count: int, margins: list[float]) -> Tensor:
    """The first `count` tokens by rising `order`, normalised."""
    if count >= int((probs > 0).sum()):
        return probs
    values, index = order.sort()
    margins.append(float(values[count] - values[count - 1]))
    kept = torch.zeros_like(probs)
    kept[index[:count]] = probs[index[:count]]
    return kept / kept.sum()
