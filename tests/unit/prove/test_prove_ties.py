"""Where texts differ: a tie if rounding could have swapped the two tokens, a bug if not."""

from types import SimpleNamespace

import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.prove.settings import TextCase
from outrider.prove.texts import TIE_FACTOR, TextChecks


class Passes:
    """Plain passes whose logits are given: token 3 is the best, 5 behind it by `gap`."""

    def __init__(self, gap):
        self.gap, self.asked = gap, []

    def logits_after(self, texts):
        self.asked += texts
        logits = torch.full((1, 8), -4.0)
        logits[0, 3], logits[0, 5] = 2.0, 2.0 - self.gap
        return logits


def result(*tokens):
    return SimpleNamespace(tokens=tokens, text="", finish_reason="length", stop_reason=None, logprobs=(), seed=0)


@pytest.mark.parametrize(
    ("gap", "rounding", "second", "status"),
    [
        (0.01, 0.005, 5, "tie"),
        (0.01, 0.002, 5, "fails"),
        (TIE_FACTOR * 0.1 * 0.99, 0.1, 5, "tie"),
        (TIE_FACTOR * 0.1 * 1.05, 0.1, 5, "fails"),
        (0.01, 0.005, 6, "fails"),  # neither of the two best
        (0.0, 0.0, 5, "tie"),
    ],
)
def test_a_difference_is_judged_by_rounding(gap, rounding, second, status):
    passes = Passes(gap)
    checks = TextChecks(passes, SimpleNamespace(), rounding, frozenset())
    case = TextCase(name="x", prompt=(1, 2), params=SamplingParams(max_tokens=3))
    found = checks.difference(case, result(7, 3, 1), result(7, second, 2))
    assert passes.asked == [(1, 2, 7)], "the logits behind what both have"
    assert found is not None
    assert found.status == status
    assert found.gap == pytest.approx(gap, abs=1e-5)
    assert checks.difference(case, result(7, 3), result(7, 3)) is None
