"""From logits to the law the next token is drawn from: one ordered pipeline, one row per position.

Order: logit bias; repetition, frequency and presence penalties; the caller's own logits
processors; masks (allowed, banned, min_tokens, the constraint); then, above temperature 0, temperature, top-k,
top-p, min-p, typical-p. Each truncation sees the law the one before it left, as in Transformers.

Ties are never broken by chance or by device: top-k, top-p and typical-p keep every token that
ties with the last one kept; where one token must be taken, the lowest id among the best wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ModelError, RequestError
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence

Path = tuple[Token, ...]


_HEAD = 1024  # how many tokens truncation sorts at first
COLDEST = 1e-30  # below this float32 cannot divide; the law is the same
_NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of logits of one text: how many guesses lie before each, and which."""

    depths: Seq[int]
    paths: Callable[[], Seq[Path]]
    """Asked only where options look at the guesses: those may still be on a device."""


def process_logits(logits: Tensor, seq: Sequence, paths: Seq[Path]) -> Tensor:
    """The logits of the law itself: float32 or finer [R, vocab], a new tensor.

    Row r of logits was scored after seq.tokens followed by paths[r], and is shaped as if that
    path were text already. Removed tokens are -inf. A row that leaves nothing to choose, or
    whose processors fail, has no finite maximum; `explain` says why.
    """
    params, x = seq.params, _fine(logits)
    if params.greedy or not seq.untouched:
        x = x.clone()
        touch(x, seq, paths)
    if params.greedy:
        return x
    x = apply_temperature(x, [params.temperature] * len(paths))
    return x if params.untruncated else _truncate(x, params)


def touch(x: Tensor, seq: Sequence, paths: Seq[Path]) -> None:
    """All that comes before temperature, in place: bias, penalties, processors, masks."""
    if seq.untouched:
        return
    _weigh(x, seq, paths)
    if seq.params.logits_processors:
        _process_rows(x, seq, paths)
    _mask(x, seq, paths)


def apply_temperature(logits: Tensor, temperatures: Seq[float]) -> Tensor:
    """Each row less its maximum, over its temperature: a new tensor [R, vocab], best value 0.

    Taking the maximum away first keeps small temperatures from overflowing.
    """
    x = _fine(logits)
    column = torch.tensor([max(t, COLDEST) for t in temperatures], dtype=x.dtype, device=x.device)[:, None]
    return (x - x.amax(-1, keepdim=True)).div_(column)


def law(shaped: Tensor, *, greedy: bool = False) -> Tensor:
    """Probabilities of shaped logits: float64 [R, vocab]; all NaN where nothing can be chosen.

    Greedy puts all weight on the best token, the lowest id among equals.
    """
    if not greedy:
        return shaped.double().softmax(-1)
    value, best = shaped.max(-1, keepdim=True)
    point = torch.zeros(shaped.shape, dtype=torch.float64, device=shaped.device).scatter_(-1, best, 1.0)
    return point.masked_fill_(~value.isfinite(), math.nan)


def token_logprobs(logits: Tensor, tokens: Seq[Token], top: int) -> list[TokenLogprob]:
    """What the target itself (raw logits [R, vocab]) thought of tokens[r], and its `top` best.

    Rank 1 is the best; equals share the better rank. Alternatives come best first, lower ids
    first among equals.
    """
    x = _fine(logits)
    top = min(top, x.shape[-1])
    total = x.logsumexp(-1, keepdim=True)
    chosen = x.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=x.device)[:, None])
    rank = (x > chosen).sum(-1, keepdim=True) + 1
    value, index = _best(x, top)
    packed = torch.cat([t.double() for t in (total, chosen, rank, value, index)], dim=-1)
    out: list[TokenLogprob] = []
    for token, (norm, own, place, *rest) in zip(tokens, packed.tolist(), strict=True):  # one transfer
        best = sorted(zip(rest[:top], rest[top:], strict=True), key=lambda each: (-each[0], each[1]))
        pairs = tuple((int(i), x - norm) for x, i in best)
        out.append(TokenLogprob(token, own - norm, int(place), pairs))
    return out


def _best(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` largest of each row and where they stand, both [R, top]: the lowest ids where equals compete."""
    value, index = x.topk(top, dim=-1)
    if top and bool(((x == value[:, -1:]).sum(-1) > (value == value[:, -1:]).sum(-1)).any()):
        value, index = (part[:, :top] for part in x.sort(dim=-1, descending=True, stable=True))
    return value, index


def explain(logits: Tensor, seq: Sequence) -> RequestError:
    """Why nothing can follow the text, given the raw row of logits [vocab] after it."""
    where = f"request {seq.id} cannot go on at token {len(seq.tokens)}"
    if not logits.amax().isfinite():
        return ModelError(f"{where}: the model's logits are NaN or infinite there; check its weights and dtype")
    x = _fine(logits[None]).clone()
    _weigh(x, seq, [()])
    try:
        _process(x[0], seq, ())
    except RequestError as error:
        return RequestError(f"{where}: {error}")
    if seq.constraint is not None and seq.constraint.problem:
        return RequestError(f"{where}: {seq.constraint.problem}")
    also = "" if seq.constraint is None else "the constraint, "
    return RequestError(
        f"{where}: no token is left to choose; {also}allowed_token_ids, banned_token_ids, min_tokens and "
        f"logits_processors together rule out all {logits.shape[-1]}, so loosen one of them"
    )


def _fine(logits: Tensor) -> Tensor:
    """At least float32; the same tensor where it already is."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _ids(tokens: Seq[Token] | frozenset[Token], like: Tensor) -> Tensor:
    """Those tokens that have a column in `like`, as an index."""
    return _send(_here(tokens, like.shape[-1]), like.device)


def _here(tokens: Seq[Token] | frozenset[Token], vocab: int) -> Tensor:
    """Those tokens that a row of so many has, on the host."""
    return torch.tensor([t for t in tokens if 0 <= t < vocab], dtype=torch.int64)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _weigh(x: Tensor, seq: Sequence, paths: Seq[Path]) -> None:
    """Bias, then penalties, in place."""
    params = seq.params
    if params.logit_bias:
        bias = [(t, b) for t, b in params.logit_bias.items() if 0 <= t < x.shape[-1]]
        values = _send(torch.tensor([b for _, b in bias], dtype=x.dtype), x.device)
        x.index_add_(1, _ids([t for t, _ in bias], x), values.expand(len(x), -1))
    if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
        _penalise(x, seq, paths)


def _penalise(x: Tensor, seq: Sequence, paths: Seq[Path]) -> None:
    """Penalties, in place, each row counting its own path; only the columns of tokens seen are touched.

    Tokens are counted on the host, where they are: a device that is busy would have to be waited for.
    """
    params, vocab = seq.params, x.shape[-1]
    prompt, output = _here(seq.tokens[: seq.prompt_len], vocab), _here(seq.tokens[seq.prompt_len :], vocab)
    steps = [(r, t) for r, path in enumerate(paths) for t in path if 0 <= t < vocab]
    rows = torch.tensor([r for r, _ in steps], dtype=torch.int64)
    drafted = _here([t for _, t in steps], vocab)
    ids, place = torch.cat([prompt, output, drafted]).unique(return_inverse=True)  # [seen]
    in_prompt, in_output, in_path = place.split([len(prompt), len(output), len(drafted)])
    count = torch.bincount(in_output, minlength=len(ids)).to(x.dtype).repeat(len(paths), 1)  # [R, seen]
    count.index_put_((rows, in_path), torch.ones_like(rows, dtype=x.dtype), accumulate=True)
    repeated = _send((count > 0) | (torch.bincount(in_prompt, minlength=len(ids)) > 0), x.device)
    ids, count = _send(ids, x.device), _send(count, x.device)
    values = x[:, ids]
    if params.repetition_penalty != 1:
        penalised = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
        values = torch.where(repeated, penalised, values)
    x[:, ids] = values - (params.frequency_penalty * count + params.presence_penalty * (count > 0))


def _process_rows(x: Tensor, seq: Sequence, paths: Seq[Path]) -> None:
    """Each row through the caller's processors, in place; NaN where they fail."""
    for r, path in enumerate(paths):
        try:
            x[r] = _process(x[r], seq, path)
        except RequestError:
            x[r] = math.nan  # this row alone: the draft that leads here may never be kept


def _process(row: Tensor, seq: Sequence, path: Path) -> Tensor:
    """One row [vocab] through the caller's processors; RequestError names the one that failed."""
    for i, processor in enumerate(seq.params.logits_processors):
        try:
            out = processor([*seq.tokens, *path], row)
        except Exception as error:  # whatever the caller's code raises concerns this request alone
            raise RequestError(f"logits_processors[{i}] failed: {type(error).__name__}: {error}") from error
        if not isinstance(out, Tensor) or out.shape != row.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise RequestError(f"logits_processors[{i}] must return logits of shape {tuple(row.shape)}, got {got}")
        row = out.to(row)
    # +inf is how a processor insists on a token; as the largest number it still has a law
    return row.clamp(max=torch.finfo(row.dtype).max)


def _mask(x: Tensor, seq: Sequence, paths: Seq[Path]) -> None:
    """Rule tokens out, in place."""
    params = seq.params
    if params.allowed_token_ids is not None:
        refused = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
        refused.index_fill_(0, _ids(params.allowed_token_ids, x), False)
        x.masked_fill_(refused, _NEVER)
    if params.banned_token_ids:
        x.index_fill_(1, _ids(params.banned_token_ids, x), _NEVER)
    early = [r for r, path in enumerate(paths) if seq.generated + len(path) < params.min_tokens]
    if early and seq.stop_ids:
        rows = _send(torch.tensor(early, dtype=torch.int64), x.device)
        x[rows] = x[rows].index_fill(1, _ids(seq.stop_ids, x), _NEVER)
    if seq.constraint is not None:
        _hold(x, seq.constraint.allowed(paths, seq.stop_ids))


def _hold(x: Tensor, allowed: Tensor) -> None:
    """Rule out, in place, what `allowed` [R, vocab] does not name; rows of padding have no token to name."""
    known = min(x.shape[-1], allowed.shape[-1])
    x[:, :known].masked_fill_(~allowed[:, :known].to(x.device), _NEVER)
    x[:, known:] = _NEVER


def _truncate(x: Tensor, params: SamplingParams) -> Tensor:
    """Remove unlikely tokens, in place; the best one always stays. x comes from `apply_temperature`."""
    head = min(_HEAD, x.shape[-1])
    if params.top_k:
        kth = x.topk(min(params.top_k, x.shape[-1]), dim=-1).values[:, -1:]
        x.masked_fill_(x < kth, _NEVER)
        head = min(head, params.top_k)  # no others are left, but for ties
    if params.top_p < 1:
        x.masked_fill_(-x > _cutoff(-x, x.softmax(-1), params.top_p, head), _NEVER)
    if params.min_p > 0:
        x.masked_fill_(x < x.amax(-1, keepdim=True) + math.log(params.min_p), _NEVER)
    if params.typical_p < 1:
        information = -x.log_softmax(-1)
        p = information.neg().exp()
        # summed in float64: how torch splits a sum depends on the number of rows, a law must not
        entropy = torch.special.entr(p).sum(-1, keepdim=True, dtype=torch.float64).to(x.dtype)
        surprise = (information - entropy).abs()
        x.masked_fill_(surprise > _cutoff(surprise, p, params.typical_p, head), _NEVER)
    return x


def _cutoff(scores: Tensor, probs: Tensor, mass: float, head: int) -> Tensor:
    """The score [R, 1] at which tokens taken in order of rising score first reach `mass`.

    The `head` lowest scores are sorted, and all of them only where those hold too little.
    """
    score, index = scores.topk(head, dim=-1, largest=False)
    reached = probs.gather(-1, index).double().cumsum(-1)
    if head < scores.shape[-1] and not bool((reached[:, -1] >= mass).all()):
        score, index = scores.sort(dim=-1)
        reached = probs.gather(-1, index).double().cumsum(-1)
    crossing = (reached < mass).sum(-1, keepdim=True).clamp_(max=score.shape[-1] - 1)
    return score.gather(-1, crossing)
