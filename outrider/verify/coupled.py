"""Mode `seeded`: at every position the target takes its own token; a draft is kept where it foresaw it.

The target's token is argmax(shaped logits + Gumbel noise), the noise a pure function of the
request's seed, the token's place in the text and its id; greedy is the same with no noise. That
choice follows the target's law whoever drafted what, so a draft decides only how many tokens
arrive at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import NO_TOKEN, Token
from outrider.core.sequence import Sequence
from outrider.verify.choose_cuda import choose_rows
from outrider.verify.noise import TARGET, gumbel_rows, rows_at_once
from outrider.verify.probs import Path, Rows, apply_temperature, explain, process_logits

Place = tuple[int, int]  # a seed and a position: where noise is looked up


class Seeded:
    """The verifier of mode `seeded`."""

    def decide(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, lengths: Tensor | None = None
    ) -> HostCopy | None:
        return _decide(logits, seqs, [_rows(draft) for draft in drafts], lengths)

    def judge(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, decided: HostCopy | None = None
    ) -> list[Verdict | RequestError]:
        decided = decided or _decide(logits, seqs, [_rows(draft) for draft in drafts])
        verdicts: list[Verdict | RequestError] = []
        row = 0
        for seq, draft, chosen in zip(seqs, drafts, _split(decided, [1 + len(draft) for draft in drafts]), strict=True):
            verdicts.append(settle(match(draft, chosen), logits, row, seq))
            row += 1 + len(draft)
        return verdicts


def choose(logits: Tensor, seqs: Seq[Sequence], drafts: Seq[Draft]) -> list[list[Token]]:
    """The target's own token after each text and after every node of its draft.

    logits [N, vocab] come sequence by sequence, 1 + len(draft) rows each. NOTHING where
    nothing can be chosen.
    """
    return _choose(logits, seqs, [_rows(draft) for draft in drafts])


def choose_after(logits: Tensor, seqs: Seq[Sequence], paths: Seq[Seq[Path]]) -> list[list[Token]]:
    """The token taken after seqs[i].tokens followed by each of paths[i]: one row of logits each."""
    return _choose(logits, seqs, [Rows([len(path) for path in each], partial(list, each)) for each in paths])


def _rows(draft: Draft) -> Rows:
    return Rows((0, *draft.depths()), partial(draft_paths, draft))


def _choose(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> list[list[Token]]:
    return _split(_decide(logits, seqs, texts), [len(text.depths) for text in texts])


def _split(decided: HostCopy, counts: Seq[int]) -> list[list[Token]]:
    """Each text's own choices."""
    each = iter(decided.list())
    return [list(islice(each, count)) for count in counts]


def _decide(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows], lengths: Tensor | None = None) -> HostCopy:
    """The token of every row of logits [N, vocab], on its way: int64 [N]."""
    total = sum(len(text.depths) for text in texts)
    if total != len(logits):
        raise ValueError(f"{total} rows of logits are needed, 1 for each text and draft node; got {len(logits)}")
    if logits.is_cuda and total:
        return HostCopy(choose_rows(logits, seqs, texts, lengths))
    known = [len(seq.tokens) for seq in seqs] if lengths is None else lengths.tolist()
    return HostCopy(torch.tensor(_by_parts(logits, seqs, texts, known), dtype=torch.int64))


def match(draft: Draft, choices: Seq[Token]) -> Verdict:
    """Follow the target's choices down the draft: choices[0] at the root, choices[i + 1] after node i.

    The first choice that no child holds ends the walk and is the target's own token.
    """
    if draft.parents is None:
        pairs = enumerate(zip(draft.tokens, choices, strict=False))
        stood = next((i for i, (token, chosen) in pairs if token != chosen or chosen == NO_TOKEN), len(draft))
        return Verdict(tuple(choices[: stood + 1]), tuple(range(stood)))
    child = {(draft.parent(node), token): node for node, token in enumerate(draft.tokens)}
    path: list[int] = []
    tokens = [choices[0]]
    node = child.get((-1, choices[0]))
    while node is not None and tokens[-1] != NO_TOKEN:
        path.append(node)
        tokens.append(choices[node + 1])
        node = child.get((node, tokens[-1]))
    return Verdict(tuple(tokens), tuple(path))


def settle(verdict: Verdict, logits: Tensor, row: int, seq: Sequence) -> Verdict | RequestError:
    """The verdict, unless it found nothing to take; then what stands before that, or why nothing does.

    logits[row] is what was scored after the text itself.

    The last kept token is the target's own choice too, so a verdict may end with it: the text
    grows just as it would without a draft, and the next round fails at its first row.
    """
    if verdict.tokens[-1] != NO_TOKEN:
        return verdict
    return Verdict(verdict.tokens[:-1], verdict.path[:-1]) if verdict.path else explain(logits[row], seq)


def draft_paths(draft: Draft) -> list[Path]:
    """The draft tokens on the way to each row: none for the text's own, then to each node."""
    paths: list[Path] = [()]
    for node, token in enumerate(draft.tokens):
        paths.append((*paths[draft.parent(node) + 1], token))
    return paths


def split_rows(logits: Tensor, drafts: Seq[Draft]) -> Seq[Tensor]:
    """Each sequence's own rows: 1 + len(draft) of them."""
    return logits.split([1 + len(draft) for draft in drafts])


def noisy_best(shaped: Tensor, places: Seq[Place], *, stream: int = TARGET) -> tuple[Tensor, Tensor]:
    """The maximum of each row of shaped [R, vocab] plus its place's noise, and its token: two [R].

    Rows of one place (siblings' children in a tree) share one row of noise.
    """
    rows_of: dict[Place, list[int]] = {}
    for row, place in enumerate(places):
        rows_of.setdefault(place, []).append(row)
    groups = list(rows_of.items())
    values = torch.empty(len(shaped), dtype=torch.float64, device=shaped.device)
    tokens = torch.empty(len(shaped), dtype=torch.int64, device=shaped.device)
    step = rows_at_once(shaped.shape[-1], shaped.device)
    for start in range(0, len(groups), step):
        piece = groups[start : start + step]
        seeds, positions = zip(*(place for place, _ in piece), strict=True)
        noise = gumbel_rows(seeds, positions, shaped.shape[-1], stream=stream, device=shaped.device)
        which = [i for i, (_, members) in enumerate(piece) for _ in members]
        rows = [row for _, members in piece for row in members]
        values[rows], tokens[rows] = _take(noise, which).add_(_take(shaped, rows)).max(-1)
    return values, tokens


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are maximised together; `places` where noise is added first."""

    rows: Seq[int]
    shaped: Tensor  # [len(rows), vocab]
    places: Seq[Place] | None


def _by_parts(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows], lengths: Seq[int]) -> list[Token]:
    """The token of every row of logits [N, vocab], in order; NOTHING where there is none."""
    flat = [NO_TOKEN] * len(logits)
    for part in _parts(logits, seqs, texts, lengths):
        for row, token in zip(part.rows, _best(part).tolist(), strict=True):
            flat[row] = token
    return flat


def _parts(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows], lengths: Seq[int]) -> Iterator[_Part]:
    """Sequences with options of their own one by one; all plain greedy and all plain sampled rows at once."""
    greedy: list[int] = []
    sampled: list[int] = []
    places: list[Place] = []
    temperatures: list[float] = []
    start = 0
    for seq, text, length in zip(seqs, texts, lengths, strict=True):
        rows = range(start, start + len(text.depths))
        start = rows.stop
        here = [(seq.seed, length + depth) for depth in text.depths]
        if not seq.plain_logits:
            shaped = process_logits(logits[rows.start : rows.stop], seq, text.paths())
            yield _Part(rows, shaped, None if seq.params.greedy else here)
        elif seq.params.greedy:
            greedy += rows
        else:
            sampled += rows
            places += here
            temperatures += [seq.params.temperature] * len(rows)
    if greedy:
        yield _Part(greedy, _take(logits, greedy), None)
    if sampled:
        yield _Part(sampled, apply_temperature(_take(logits, sampled), temperatures), places)


def _best(part: _Part) -> Tensor:
    """The token of each row, NOTHING where the best value is no number: int64 [R]."""
    values, tokens = part.shaped.max(-1) if part.places is None else noisy_best(part.shaped, part.places)
    return tokens.masked_fill(~values.isfinite(), NO_TOKEN)


def _take(rows: Tensor, index: Seq[int]) -> Tensor:
    """rows[index], without a copy where they lie side by side."""
    first = index[0]
    if list(index) == list(range(first, first + len(index))):
        return rows[first : first + len(index)]
    return rows[list(index)]
