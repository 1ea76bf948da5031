"""Mode `seeded`: at every position the target takes its own token; a draft is kept where it foresaw it.

The target's token is argmax(shaped logits + Gumbel noise), the noise a pure function of the
request's seed, the token's place in the text and its id; greedy is the same with no noise. That
choice follows the target's law whoever drafted what, so a draft decides only how many tokens
arrive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from outrider.core import Draft, Sequence, Token, Verdict
from outrider.errors import RequestError
from outrider.verify.law import COLDEST, NOTHING, Path, explain, shape_logits, temper
from outrider.verify.noise import TARGET, gumbel_rows, rows_at_once

Place = tuple[int, int]  # a seed and a position: where noise is looked up


class Seeded:
    """The verifier of mode `seeded`."""

    def judge(self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> list[Verdict | RequestError]:
        choices = choose(logits, seqs, drafts)
        verdicts: list[Verdict | RequestError] = []
        row = 0
        for seq, draft, chosen in zip(seqs, drafts, choices, strict=True):
            verdicts.append(settle(match(draft, chosen), logits, row, seq))
            row += 1 + len(draft)
        return verdicts


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of logits of one text: how many guesses lie before each, and which."""

    depths: Seq[int]
    paths: Callable[[], Seq[Path]]
    """Asked only where options look at the guesses: those may still be on a device."""


def choose(logits: Tensor, seqs: Seq[Sequence], drafts: Seq[Draft]) -> list[list[Token]]:
    """The target's own token after each text and after every node of its draft.

    logits [N, vocab] come sequence by sequence, 1 + len(draft) rows each. NOTHING where
    nothing can be chosen.
    """
    return _choose(logits, seqs, [Rows((0, *draft.depths()), partial(draft_paths, draft)) for draft in drafts])


def choose_after(logits: Tensor, seqs: Seq[Sequence], paths: Seq[Seq[Path]]) -> list[list[Token]]:
    """The token taken after seqs[i].tokens followed by each of paths[i]: one row of logits each."""
    return _choose(logits, seqs, [Rows([len(path) for path in each], partial(list, each)) for each in paths])


def _choose(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> list[list[Token]]:
    total = sum(len(text.depths) for text in texts)
    if total != len(logits):
        raise ValueError(f"{total} rows of logits are needed, 1 for each text and draft node; got {len(logits)}")
    rows: list[int] = []
    taken: list[Tensor] = []
    for part in _parts(logits, seqs, texts):
        rows += part.rows
        taken.append(part.best())
    flat = [NOTHING] * total
    tokens = (taken[0] if len(taken) == 1 else torch.cat(taken)).tolist() if taken else []  # the one transfer
    for row, token in zip(rows, tokens, strict=True):
        flat[row] = token
    each = iter(flat)
    return [list(islice(each, len(text.depths))) for text in texts]


def match(draft: Draft, choices: Seq[Token]) -> Verdict:
    """Follow the target's choices down the draft: choices[0] at the root, choices[i + 1] after node i.

    The first choice that no child holds ends the walk and is the target's own token.
    """
    if draft.parents is None:
        pairs = enumerate(zip(draft.tokens, choices, strict=False))
        stood = next((i for i, (token, chosen) in pairs if token != chosen), len(draft))
        return Verdict(tuple(choices[: stood + 1]), tuple(range(stood)))
    child = {(draft.parent(node), token): node for node, token in enumerate(draft.tokens)}
    path: list[int] = []
    tokens = [choices[0]]
    node = child.get((-1, choices[0]))
    while node is not None and tokens[-1] != NOTHING:
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
    if verdict.tokens[-1] != NOTHING:
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
    """Rows that are maximised together."""

    rows: Seq[int]
    logits: Tensor  # [len(rows), vocab]
    places: Seq[Place]
    temperatures: Seq[float]
    """Of each row, to divide its logits by before its place's noise is added; 0 takes the best logit as it is."""

    def best(self) -> Tensor:
        """The token of each row, NOTHING where the best value is no number: int64 [R]."""
        if self.logits.is_cuda:
            return _choose_on_device(self)
        if not any(self.temperatures):
            values, tokens = self.logits.max(-1)
        elif all(t == 1 for t in self.temperatures):
            values, tokens = noisy_best(self.logits, self.places)
        else:
            values, tokens = noisy_best(temper(self.logits, self.temperatures), self.places)
        return tokens.masked_fill(~values.isfinite(), NOTHING)


def _choose_on_device(part: _Part) -> Tensor:
    """One kernel for scaling, noise and choice; nothing is waited for."""
    from outrider.kernels import triton_sample

    if not any(part.temperatures):
        return triton_sample.choose(part.logits)
    words = torch.empty(3, len(part.rows), dtype=torch.int64, pin_memory=True)
    array = words.numpy()
    array[0] = np.array([seed for seed, _ in part.places], dtype=np.uint64).view(np.int64)
    array[1] = [position for _, position in part.places]
    array[2].view(np.float64)[:] = [max(t, COLDEST) if t else 0.0 for t in part.temperatures]
    seeds, positions, temperatures = words.to(part.logits.device, non_blocking=True)
    return triton_sample.choose(part.logits, temperatures.view(torch.float64), seeds, positions)


def _parts(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> Iterator[_Part]:
    """Sequences with options of their own one by one; all plain greedy and all plain sampled rows at once.

    A device's kernel takes greedy and sampled rows together.
    """
    plain: dict[bool, tuple[list[int], list[Place], list[float]]] = {}
    start = 0
    for seq, text in zip(seqs, texts, strict=True):
        rows = range(start, start + len(text.depths))
        start = rows.stop
        here = [(seq.seed, len(seq.tokens) + depth) for depth in text.depths]
        if not seq.plain_logits:
            shaped = shape_logits(logits[rows.start : rows.stop], seq, text.paths())
            yield _Part(rows, shaped, here, [0.0 if seq.params.greedy else 1.0] * len(rows))
            continue
        kind = seq.params.greedy and not logits.is_cuda
        own, places, temperatures = plain.setdefault(kind, ([], [], []))
        own += rows
        places += here
        temperatures += [seq.params.temperature] * len(rows)
    for own, places, temperatures in plain.values():
        yield _Part(own, _take(logits, own), places, temperatures)


def _take(rows: Tensor, index: Seq[int]) -> Tensor:
    """rows[index], without a copy where they lie side by side."""
    first = index[0]
    if list(index) == list(range(first, first + len(index))):
        return rows[first : first + len(index)]
    return rows[list(index)]
