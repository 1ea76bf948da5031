"""A history for `suffix` from a target's answers: those that share the most with others, up to a number of tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np

from outrider.core.errors import ConfigError
from outrider.core.sampling import Token, check_int
from outrider.drafters.history import MAX_TOKENS
from outrider.train.corpus import Corpus

GRAM = 4  # tokens of the runs that are counted


def choose_answers(corpus: Corpus, tokens: int) -> list[list[Token]]:
    """Answers of at most so many tokens in all, the most useful last: what is read last is kept longest.

    An answer is worth the share of its runs of four tokens that other answers hold too.
    """
    check_int("tokens", tokens, 1, MAX_TOKENS)
    train, _ = corpus.split()
    answers = [corpus.text(int(i))[int(corpus.prompt_lens[i]) :].tolist() for i in train]
    runs = [{tuple(answer[at : at + GRAM]) for at in range(len(answer) - GRAM + 1)} for answer in answers]
    holders = Counter(run for own in runs for run in own)
    worth = [np.mean([holders[run] > 1 for run in own]) if own else 0.0 for own in runs]
    chosen: list[list[Token]] = []
    left = tokens
    for i in sorted(range(len(answers)), key=lambda i: (-worth[i], i)):
        if 0 < len(answers[i]) <= left:
            chosen.append(answers[i])
            left -= len(answers[i])
    if not chosen:
        raise ConfigError(f"no answer has at most {tokens} tokens; give more --tokens, or collect answers first")
    return chosen[::-1]
