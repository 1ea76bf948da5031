"""Mode `seeded`: at every position the target chooses its own token; a draft token is accepted where it is that choice.

The target's choice is argmax(processed logits + Gumbel noise). The noise is a pure function of the
request's seed, the token's position in the text and its id; greedy is the same without noise. That
choice follows the target's distribution whatever is drafted, so a draft only decides how many
tokens a round yields.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from operator import is_

import torch
from torch import Tensor

from outrider.core.draft import Draft, TokenPath, Verdict
from outrider.core.draws import Draws
from outrider.core.errors import RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import NO_TOKEN, Token
from outrider.core.sequence import Sequence
from outrider.verify.choose_cuda import choose_rows_cuda
from outrider.verify.largest import largest, largest_of_numpy
from outrider.verify.noise import TARGET, gumbel_rows, rows_at_once
from outrider.verify.probs import (
    MIN_TEMPERATURE,
    LogitRows,
    Positions,
    apply_temperature,
    no_token_error,
    positions_of,
    process_logits,
)

SeedPosition = tuple[int, int]  # the seed and the position in the text that a row of noise is for


class SeededVerifier:
    """The verifier of mode `seeded`."""

    def __init__(self) -> None:
        self._last: tuple[list[Sequence], Draws | None] = [], None
        """The sequences and the result of the last call of `draws`, valid for these sequences: options never change."""

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, positions: Positions | None = None
    ) -> HostCopy | None:
        return _decide(logits, seqs, [_rows_of(draft) for draft in drafts], positions)

    def draws(self, seqs: Seq[Sequence]) -> Draws | None:
        known, draws = self._last
        if len(known) != len(seqs) or not all(map(is_, known, seqs)):
            draws = _draws_of(seqs)
            self._last = [*seqs], draws
        return draws

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        chosen = _choices(logits, seqs, drafts) if decided is None else decided.list()
        verdicts: list[Verdict | RequestError] = []
        row = 0
        for seq, draft in zip(seqs, drafts, strict=True):
            end = row + 1 + len(draft.tokens)
            verdicts.append(drop_missing_token(accept_draft(draft, chosen[row:end]), logits, row, seq))
            row = end
        return verdicts


def _draws_of(seqs: Seq[Sequence]) -> Draws | None:
    if not all(seq.plain_logits for seq in seqs):
        return None
    params = [seq.params for seq in seqs]
    warmth = [0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params]
    return Draws([seq.seed for seq in seqs], warmth, any(p.logprobs is not None for p in params))


def choose_tokens(logits: Tensor, seqs: Seq[Sequence], drafts: Seq[Draft]) -> list[list[Token]]:
    """The target's choice after each text and after every node of its draft; NO_TOKEN where there is none.

    logits [N, vocab] come sequence by sequence, 1 + len(draft) rows each.
    """
    return _split(_choices(logits, seqs, drafts), drafts)


def choose_after_paths(logits: Tensor, seqs: Seq[Sequence], paths: Seq[TokenPath]) -> list[Token]:
    """The token chosen after seqs[r].tokens and then paths[r], for each row r of logits [R, vocab]."""
    rows = [LogitRows(1, lambda path=path: (len(path),), lambda path=path: (path,)) for path in paths]
    return _decide(logits, seqs, rows).list()


def _rows_of(draft: Draft) -> LogitRows:
    return LogitRows(1 + len(draft.tokens), lambda: (0, *draft.depths()), lambda: draft_paths(draft))


def _split(choices: list[Token], drafts: Seq[Draft]) -> list[list[Token]]:
    """Each sequence's own choices."""
    rest = iter(choices)
    return [list(islice(rest, 1 + len(draft.tokens))) for draft in drafts]


def _choices(logits: Tensor, seqs: Seq[Sequence], drafts: Seq[Draft]) -> list[Token]:
    """The choice of every row of logits [N, vocab], on the host. Plain greedy rows on the CPU take the short way."""
    total = len(drafts) + sum(len(draft.tokens) for draft in drafts)
    if total == len(logits) and largest_of_numpy(logits) and all(s.params.greedy and s.plain_logits for s in seqs):
        return _largest_tokens(logits)
    return _decide(logits, seqs, [_rows_of(draft) for draft in drafts]).list()


def _largest_tokens(logits: Tensor) -> list[Token]:
    """The token of each row of logits [N, vocab], NO_TOKEN where the best value is not finite; as `_best_tokens`."""
    values = logits.detach().numpy()
    tokens: list[Token] = values.argmax(-1).tolist()
    return [token if isfinite(values[row, token]) else NO_TOKEN for row, token in enumerate(tokens)]


def _decide(logits: Tensor, seqs: Seq[Sequence], rows: Seq[LogitRows], positions: Positions | None = None) -> HostCopy:
    """Launch the choice of every row of logits [N, vocab]: int64 [N]. positions: as for `Verifier.decide`."""
    total = sum(each.count for each in rows)
    if total != len(logits):
        raise ValueError(f"{total} rows of logits are needed, 1 for each text and draft node; got {len(logits)}")
    if logits.is_cuda and total:
        return HostCopy(choose_rows_cuda(logits, seqs, rows, positions))
    return HostCopy(torch.tensor(_choose_rows(logits, seqs, rows, positions), dtype=torch.int64))


def accept_draft(draft: Draft, choices: Seq[Token]) -> Verdict:
    """Accept draft tokens while they are the target's choices: choices[0] at the root, choices[i + 1] after node i.

    The first choice that no child holds is the verdict's last token, the target's own.
    """
    if not draft.tokens:
        return Verdict((choices[0],))
    if draft.parents is None:
        accepted = 0
        for token, chosen in zip(draft.tokens, choices, strict=False):
            if token != chosen or chosen == NO_TOKEN:
                break
            accepted += 1
        return Verdict(tuple(choices[: accepted + 1]), tuple(range(accepted)))
    child = {key: node for node, key in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens = [choices[0]]
    node = child.get((-1, choices[0]))
    while node is not None and tokens[-1] != NO_TOKEN:
        path.append(node)
        tokens.append(choices[node + 1])
        node = child.get((node, tokens[-1]))
    return Verdict(tuple(tokens), tuple(path))


def drop_missing_token(verdict: Verdict, logits: Tensor, row: int, seq: Sequence) -> Verdict | RequestError:
    """The verdict; where its last token is NO_TOKEN, the verdict without it, or an error if nothing is accepted.

    logits[row] is the row right after the text. The last accepted token is the target's own choice
    too, so a verdict may end with it: the text grows as without a draft, and the next round fails
    at its first row.
    """
    if verdict.tokens[-1] != NO_TOKEN:
        return verdict
    if verdict.path:
        return Verdict(verdict.tokens[:-1], verdict.path[:-1])
    return no_token_error(logits[row] if len(logits) else logits, seq)  # no logits where the pass made the choices


def draft_paths(draft: Draft) -> list[TokenPath]:
    """For each row of logits, the draft tokens before it: none after the text, then those down to each node."""
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    paths: list[TokenPath] = [()]
    for parent, token in zip(parents, draft.tokens, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def gumbel_max(processed: Tensor, places: Seq[SeedPosition], *, stream: int = TARGET) -> tuple[Tensor, Tensor]:
    """The maximum of each row of processed [R, vocab] plus its noise, and its token: two [R].

    Rows of one seed and position (different nodes at one depth of a tree) share one row of noise.
    """
    rows_of: dict[SeedPosition, list[int]] = {}
    for row, place in enumerate(places):
        rows_of.setdefault(place, []).append(row)
    groups = list(rows_of.items())
    values = torch.empty(len(processed), dtype=torch.float64, device=processed.device)
    tokens = torch.empty(len(processed), dtype=torch.int64, device=processed.device)
    step = rows_at_once(processed.shape[-1], processed.device)
    for start in range(0, len(groups), step):
        piece = groups[start : start + step]
        seeds, positions = zip(*(place for place, _ in piece), strict=True)
        noise = gumbel_rows(seeds, positions, processed.shape[-1], stream=stream, device=processed.device)
        which = [i for i, (_, members) in enumerate(piece) for _ in members]
        rows = [row for _, members in piece for row in members]
        values[rows], tokens[rows] = largest(_take(noise, which).add_(_take(processed, rows)))
    return values, tokens


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows whose maximum is taken together, after noise is added where `places` are given."""

    rows: Seq[int]
    processed: Tensor  # [len(rows), vocab]
    places: Seq[SeedPosition] | None


def _choose_rows(logits: Tensor, seqs: Seq[Sequence], rows: Seq[LogitRows], positions: Positions | None) -> list[Token]:
    """The choice of every row of logits [N, vocab], in order; NO_TOKEN where there is none."""
    places: list[SeedPosition] = []
    if not all(seq.params.greedy for seq in seqs):
        seeds = [seq.seed for seq, each in zip(seqs, rows, strict=True) for _ in range(each.count)]
        known = positions_of(seqs, rows) if positions is None else positions().tolist()
        places = list(zip(seeds, known, strict=True))
    choices = [NO_TOKEN] * len(logits)
    for part in _parts(logits, seqs, rows, places):
        for row, token in zip(part.rows, _best_tokens(part).tolist(), strict=True):
            choices[row] = token
    return choices


def _parts(logits: Tensor, seqs: Seq[Sequence], rows: Seq[LogitRows], places: Seq[SeedPosition]) -> Iterator[_Part]:
    """Groups of rows: each sequence with options by itself, all plain greedy rows, and all plain sampled rows.

    places: the seed and position of each row of logits [N, vocab]; empty where every sequence is greedy.
    """
    greedy: list[int] = []
    sampled: list[int] = []
    temperatures: list[float] = []
    start = 0
    for seq, each in zip(seqs, rows, strict=True):
        own = range(start, start + each.count)
        start = own.stop
        if not seq.plain_logits:
            processed = process_logits(logits[own.start : own.stop], seq, each.paths_for(seq))
            yield _Part(own, processed, None if seq.params.greedy else places[own.start : own.stop])
        elif seq.params.greedy:
            greedy += own
        else:
            sampled += own
            temperatures += [seq.params.temperature] * each.count
    if greedy:
        yield _Part(greedy, _take(logits, greedy), None)
    if sampled:
        processed = apply_temperature(_take(logits, sampled), temperatures)
        yield _Part(sampled, processed, [places[row] for row in sampled])


def _best_tokens(part: _Part) -> Tensor:
    """The token of each row, NO_TOKEN where the best value is not finite: int64 [R]."""
    values, tokens = largest(part.processed) if part.places is None else gumbel_max(part.processed, part.places)
    return tokens.masked_fill(~values.isfinite(), NO_TOKEN)


def _take(rows: Tensor, index: Seq[int]) -> Tensor:
    """rows[index]; a view where the index is contiguous."""
    first = index[0]
    if list(index) == list(range(first, first + len(index))):
        return rows[first : first + len(index)]
    return rows[list(index)]
