"""From logits to the probabilities of the next token: one pipeline in a fixed order, for rows of one sequence.

Order: logit bias; repetition, frequency and presence penalties; the caller's own logits
processors; masks (allowed, banned, min_tokens, the constraint); then, where temperature is above 0,
temperature, top-k, top-p, min-p, typical-p. Each truncation sees the distribution that the one
before it leaves, as in Transformers.

Ties never depend on randomness or on the device: top-k, top-p and typical-p keep every token that
ties with the last one kept; where one token must be taken, the lowest id among the best is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import TokenPath
from outrider.core.errors import ModelError, RequestError
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.verify.largest import largest

Positions = Callable[[], Tensor]  # () -> int64 [N] on a device: for each row of logits, the position it decides
MIN_TEMPERATURE = 1e-30  # float32 cannot divide by less; the distribution is the same
_NUM_TOP = 1024  # how many tokens truncation sorts at first


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The rows of logits of one sequence: how many, and the draft tokens between the text and each row.

    `depths` and `paths` read the draft, which may still be on a device: they are called only where needed.
    """

    count: int
    depths: Callable[[], Seq[int]]
    """For each row, how many draft tokens precede it."""
    paths: Callable[[], Seq[TokenPath]]
    """For each row, the draft tokens that precede it."""

    def paths_for(self, seq: Sequence) -> Seq[TokenPath]:
        """The paths, where options or the constraint of `seq` depend on the text; empty ones elsewhere."""
        return self.paths() if seq.reads_text else [()] * self.count


def positions_of(seqs: Seq[Sequence], rows: Seq[LogitRows]) -> list[int]:
    """For each row of each sequence, the position in the text of the token that follows it."""
    return [len(seq.tokens) + depth for seq, each in zip(seqs, rows, strict=True) for depth in each.depths()]


def process_logits(logits: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> Tensor:
    """Logits after every sampling option: at least float32 [R, vocab], a new tensor.

    Row r of logits follows seq.tokens and then paths[r], and is processed as if that path were
    already part of the text. Removed tokens are -inf. A row without a token to choose, or whose
    processors fail, has no finite maximum; `no_token_error` says why.
    """
    params, x = seq.params, _at_least_float32(logits)
    if params.greedy or not seq.unprocessed:
        x = x.clone()
        apply_processors(x, seq, paths)
    if params.greedy:
        return x
    x = apply_temperature(x, [params.temperature] * len(paths))
    return x if params.untruncated else _truncate(x, params)


def apply_processors(x: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> None:
    """Everything before temperature, in place: bias, penalties, the caller's logits processors, masks."""
    if seq.unprocessed:
        return
    _apply_bias_and_penalties(x, seq, paths)
    if seq.params.logits_processors:
        _apply_custom_processors(x, seq, paths)
    _apply_masks(x, seq, paths)


def apply_temperature(logits: Tensor, temperatures: Seq[float]) -> Tensor:
    """Each row minus its maximum, divided by its temperature: a new tensor [R, vocab], best value 0.

    Subtracting the maximum first keeps small temperatures from overflowing.
    """
    x = _at_least_float32(logits)
    column = torch.tensor([max(t, MIN_TEMPERATURE) for t in temperatures], dtype=x.dtype, device=x.device)[:, None]
    return (x - x.amax(-1, keepdim=True)).div_(column)


def probs_of(processed: Tensor, *, greedy: bool = False) -> Tensor:
    """Probabilities of processed logits: float64 [R, vocab]; all NaN where no token can be chosen.

    Greedy gives the best token probability 1, the lowest id among equals.
    """
    if not greedy:
        return processed.double().softmax(-1)
    value, best = (part[:, None] for part in largest(processed))
    one_hot = torch.zeros(processed.shape, dtype=torch.float64, device=processed.device).scatter_(-1, best, 1.0)
    return one_hot.masked_fill_(~value.isfinite(), math.nan)


def no_token_error(logits: Tensor, seq: Sequence) -> RequestError:
    """Why no token can be chosen after the text, given the raw row of logits [vocab] after it."""
    where = f"request {seq.id} cannot go on at token {len(seq.tokens)}"
    if seq.plain_logits or not logits.amax().isfinite():  # the logits a pass itself chose from may be overwritten
        return ModelError(f"{where}: the model's logits are NaN or infinite there; check its weights and dtype")
    x = _at_least_float32(logits[None]).clone()
    _apply_bias_and_penalties(x, seq, [()])
    try:
        _run_processors(x[0], seq, ())
    except RequestError as error:
        return RequestError(f"{where}: {error}")
    if seq.constraint is not None and seq.constraint.problem:
        return RequestError(f"{where}: {seq.constraint.problem}")
    also = "" if seq.constraint is None else "the constraint, "
    return RequestError(
        f"{where}: no token is left to choose; {also}allowed_token_ids, banned_token_ids, min_tokens and "
        f"logits_processors together rule out all {logits.shape[-1]}, so loosen one of them"
    )


def _at_least_float32(logits: Tensor) -> Tensor:
    """As float32, or unchanged where it is float32 or float64."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _token_index(tokens: Seq[Token] | frozenset[Token], like: Tensor) -> Tensor:
    """The tokens that have a column in `like`: an index on its device."""
    return _to_device(_in_vocab(tokens, like.shape[-1]), like.device)


def _in_vocab(tokens: Seq[Token] | frozenset[Token], vocab: int) -> Tensor:
    """The tokens below `vocab`, on the host. A draft model may have fewer tokens than the target."""
    return torch.tensor([t for t in tokens if 0 <= t < vocab], dtype=torch.int64)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for the work queued there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _apply_bias_and_penalties(x: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> None:
    """Logit bias, then penalties, in place."""
    params = seq.params
    if params.logit_bias:
        bias = [(t, b) for t, b in params.logit_bias.items() if 0 <= t < x.shape[-1]]
        values = _to_device(torch.tensor([b for _, b in bias], dtype=x.dtype), x.device)
        x.index_add_(1, _token_index([t for t, _ in bias], x), values.expand(len(x), -1))
    if params.has_penalties:
        _apply_penalties(x, seq, paths)


def _apply_penalties(x: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> None:
    """Penalties, in place, each row counting its own path; only the columns of tokens seen change.

    Tokens are counted on the host, where they are: counting on the device would wait for it.
    """
    params, vocab = seq.params, x.shape[-1]
    prompt, output = _in_vocab(seq.tokens[: seq.prompt_len], vocab), _in_vocab(seq.tokens[seq.prompt_len :], vocab)
    steps = [(r, t) for r, path in enumerate(paths) for t in path if 0 <= t < vocab]
    rows = torch.tensor([r for r, _ in steps], dtype=torch.int64)
    drafted = _in_vocab([t for _, t in steps], vocab)
    ids, place = torch.cat([prompt, output, drafted]).unique(return_inverse=True)  # [seen]
    in_prompt, in_output, in_path = place.split([len(prompt), len(output), len(drafted)])
    count = torch.bincount(in_output, minlength=len(ids)).to(x.dtype).repeat(len(paths), 1)  # [R, seen]
    count.index_put_((rows, in_path), torch.ones_like(rows, dtype=x.dtype), accumulate=True)
    repeated = _to_device((count > 0) | (torch.bincount(in_prompt, minlength=len(ids)) > 0), x.device)
    ids, count = _to_device(ids, x.device), _to_device(count, x.device)
    values = x[:, ids]
    if params.repetition_penalty != 1:
        penalised = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
        values = torch.where(repeated, penalised, values)
    x[:, ids] = values - (params.frequency_penalty * count + params.presence_penalty * (count > 0))


def _apply_custom_processors(x: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> None:
    """The caller's logits processors, row by row, in place; a row is NaN where they fail."""
    for r, path in enumerate(paths):
        try:
            x[r] = _run_processors(x[r], seq, path)
        except RequestError:
            x[r] = math.nan  # this row alone: the draft that leads here may be rejected


def _run_processors(row: Tensor, seq: Sequence, path: TokenPath) -> Tensor:
    """One row [vocab] after the caller's processors; RequestError names the one that fails.

    At a text's first token each is called twice, to find one that is not a pure function of tokens and logits. Since
    rows are processed that are never reached, such a processor would make the text depend on the draft.
    """
    first = not seq.generated and not path
    for i, processor in enumerate(seq.params.logits_processors):
        given = row.clone() if first else row
        try:
            out = processor([*seq.tokens, *path], row)
            pure = not first or _equal_rows(out, processor([*seq.tokens, *path], given))
        except Exception as error:  # whatever the caller's code raises concerns this request alone
            raise RequestError(f"logits_processors[{i}] failed: {type(error).__name__}: {error}") from error
        if not isinstance(out, Tensor) or out.shape != row.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise RequestError(f"logits_processors[{i}] must return logits of shape {tuple(row.shape)}, got {got}")
        if not pure:
            raise RequestError(
                f"logits_processors[{i}] returned two different results for the same tokens and logits; it must be a "
                "function of these alone, without a state of its own"
            )
        row = out.to(row)
    # a processor forces a token by +inf; as the largest finite number it still has a probability
    return row.clamp(max=torch.finfo(row.dtype).max)


def _equal_rows(one: object, other: object) -> bool:
    """Whether two results of a processor are equal, NaN to NaN too; True where one is no tensor, reported elsewhere."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return True
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _apply_masks(x: Tensor, seq: Sequence, paths: Seq[TokenPath]) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place."""
    params = seq.params
    if params.allowed_token_ids is not None:
        masked = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
        masked.index_fill_(0, _token_index(params.allowed_token_ids, x), False)
        x.masked_fill_(masked, -math.inf)
    if params.banned_token_ids:
        x.index_fill_(1, _token_index(params.banned_token_ids, x), -math.inf)
    early = [r for r, path in enumerate(paths) if seq.generated + len(path) < params.min_tokens]
    if early and seq.stop_ids:
        rows = _to_device(torch.tensor(early, dtype=torch.int64), x.device)
        x[rows] = x[rows].index_fill(1, _token_index(seq.stop_ids, x), -math.inf)
    if seq.constraint is not None:
        _apply_constraint(x, seq.constraint.allowed(paths, seq.stop_ids))


def _apply_constraint(x: Tensor, allowed: Tensor) -> None:
    """Mask, in place, what `allowed` [R, vocab] does not allow; padding columns beyond it are masked too."""
    known = min(x.shape[-1], allowed.shape[-1])
    x[:, :known].masked_fill_(~allowed[:, :known].to(x.device), -math.inf)
    x[:, known:] = -math.inf


def _truncate(x: Tensor, params: SamplingParams) -> Tensor:
    """Mask unlikely tokens, in place; the best one is always kept. x comes from `apply_temperature`."""
    head = min(_NUM_TOP, x.shape[-1])
    if params.top_k:
        kth = x.topk(min(params.top_k, x.shape[-1]), dim=-1).values[:, -1:]
        x.masked_fill_(x < kth, -math.inf)
        head = min(head, params.top_k)  # no others are left, except for ties
    if params.top_p < 1:
        x.masked_fill_(-x > _cutoff(-x, x.softmax(-1), params.top_p, head), -math.inf)
    if params.min_p > 0:
        x.masked_fill_(x < x.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
    if params.typical_p < 1:
        information = -x.log_softmax(-1)
        p = information.neg().exp()
        # summed in float64: how torch splits a sum depends on the number of rows, probabilities must not
        entropy = torch.special.entr(p).sum(-1, keepdim=True, dtype=torch.float64).to(x.dtype)
        surprise = (information - entropy).abs()
        x.masked_fill_(surprise > _cutoff(surprise, p, params.typical_p, head), -math.inf)
    return x


def _cutoff(scores: Tensor, probs: Tensor, mass: float, head: int) -> Tensor:
    """The score [R, 1] at which tokens taken in order of rising score first reach `mass`.

    The `head` lowest scores are sorted; all of them only where those do not reach it.
    """
    score, index = scores.topk(head, dim=-1, largest=False)
    reached = probs.gather(-1, index).double().cumsum(-1)
    if head < scores.shape[-1] and not bool((reached[:, -1] >= mass).all()):
        score, index = scores.sort(dim=-1)
        reached = probs.gather(-1, index).double().cumsum(-1)
    crossing = (reached < mass).sum(-1, keepdim=True).clamp_(max=score.shape[-1] - 1)
    return score.gather(-1, crossing)
