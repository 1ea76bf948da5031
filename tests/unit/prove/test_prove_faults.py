"""A build made wrong on purpose does not pass: each planted fault is found, and by the part that is there for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prove_world import FewLetters, ToyDraftConfig, failing, prove_toy

from outrider.core.draft import Draft, TokenPath
from outrider.core.sequence import Sequence
from outrider.drafters.draft_model import DraftModel
from outrider.engine.text import TextStream
from outrider.prove.checks import Check, Proof
from outrider.prove.sampled import pool_rows, without_blind
from outrider.verify import chain_rules, probs

SAMPLED = ("rounding", "sampled, distribution", "pooled, distribution")


def sampled_only(key: str) -> bool:
    return key.startswith(SAMPLED)


ROWS = 28  # of options, in a proof


def few_rows(key: str) -> bool:
    """Draws of some rows alone, which are drawn the more often."""
    sampled = [f"sampled, distribution, {name}" for name in ("no option", "temperature", "top_k", "logit_bias")]
    return key in ("rounding", "pooled, distribution", *sampled)


def without_draws(key: str) -> bool:
    return not key.startswith(("sampled", "pooled"))


@pytest.mark.parametrize("drafter", ["suffix", "suffix:width=3,min_prob=0", ToyDraftConfig()], ids=str)
def test_a_correct_engine_holds_token_by_token(tmp_path: Path, drafter: Any):
    checks = prove_toy(tmp_path, drafter, only=without_draws)
    assert [check.name for check in checks if check.status != "holds"] == []
    assert sum(check.figures.get("accepted", 0) for check in checks) > 1000


def test_a_correct_engine_holds_in_distribution(tmp_path: Path):
    checks = prove_toy(tmp_path, ToyDraftConfig(), only=sampled_only)
    assert failing(checks) == []
    together = {check.name.partition("together, ")[2]: check for check in checks if "together" in check.name}
    assert set(together) == {"text", "likely and rare tokens", "drafted tokens", "draws of the draft"}
    assert together["text"].figures["compared"] > 1000
    options = [check for check in checks if " rows with " in check.name]
    assert len(options) == 13
    assert all(check.figures["visible_bias"] is not None for check in options)


def test_a_drafter_that_drafts_nothing_proves_nothing(tmp_path: Path):
    checks = prove_toy(tmp_path, "prediction", only=few_rows, modes=("distribution",), draws=64)
    (made,) = [check for check in checks if "drafts were made" in check.name]
    assert (made.status, made.figures["drafted"]) == ("not checked", 0)


def test_draws_too_few_to_show_a_fault_of_any_size_prove_nothing(tmp_path: Path):
    """Of one row of 16 draws; the same engine holds with draws of all rows, above."""
    row = ("rounding", "pooled, distribution", "sampled, distribution, no option")
    checks = prove_toy(tmp_path, ToyDraftConfig(), only=lambda key: key in row, modes=("distribution",), draws=64)
    blind = [check for check in checks if check.status == "not checked"]
    assert [check.name.partition("together, ")[2] for check in blind][:2] == ["text", "likely and rare tokens"]
    assert all(check.detail.endswith("too few to show a bias; raise --draws") for check in blind)
    proof = Proof({"model": "toy"}, checks, 1.0)
    assert (proof.exit_code, proof.as_dict()["verdict"]) == (3, "incomplete")
    assert "sampled tokens (distribution) are too few to show a fault of any size; raise --draws." in proof.headline


def test_a_test_sees_for_those_that_look_for_the_same_fault():
    """And a mode in which no text came twice was not compared at all."""
    figures = [("likeliest", None), ("likeliest", 0.1), ("drafted", None)]
    tests = [
        Check(group="sampled", name=towards, status="holds", figures={"towards": towards, "visible_bias": bias})
        for towards, bias in figures
    ]
    assert [test.status for test in without_blind(tests)] == ["holds", "holds", "not checked"]
    assert without_blind([replace(tests[2], status="fails")])[0].status == "fails"
    assert [test.status for test in pool_rows("seeded", [], 20.0)] == ["not checked"] * 2


# a residual taken from p instead of (p - q)+


def plant_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_rules, "residual", lambda p, q: p)


def test_a_residual_from_p_is_found_by_enumeration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant_residual(monkeypatch)
    found = failing(prove_toy(tmp_path, only=lambda key: key.startswith("rules")))
    assert any("enumerated" in name for name in found)


def test_a_residual_from_p_is_found_in_sampled_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant_residual(monkeypatch)
    found = failing(prove_toy(tmp_path, ToyDraftConfig(blunt=0.1), only=few_rows, draws=ROWS * 240))
    assert any("all rows together" in name for name in found)


# a sampled token dropped for low draft probability


def test_a_draft_token_dropped_for_its_low_probability_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    proposed = DraftModel.propose

    def dropping(self: DraftModel, view: Any) -> list[Draft] | None:
        drafts = proposed(self, view) or []
        return [cut(draft) for draft in drafts]

    def cut(draft: Draft) -> Draft:
        if draft.probs is None:
            return draft
        low = [i for i, token in enumerate(draft.tokens) if float(draft.probs[i, token]) < 0.1]
        return draft.first_nodes(low[0]) if low else draft

    monkeypatch.setattr(DraftModel, "propose", dropping)
    found = failing(prove_toy(tmp_path, ToyDraftConfig(), only=few_rows, draws=ROWS * 64))
    assert "distribution: all rows together, draws of the draft" in found


# penalties that ignore the draft prefix


@pytest.fixture
def forgetful_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    penalise = probs._apply_penalties

    def forgetting(x: Any, seq: Sequence, paths: Seq[TokenPath]) -> None:
        penalise(x, seq, [()] * len(paths))

    monkeypatch.setattr(probs, "_apply_penalties", forgetting)


def test_penalties_that_ignore_the_draft_are_found_by_enumeration(tmp_path: Path, forgetful_penalties: None):
    checks = prove_toy(tmp_path, only=lambda key: key.startswith("rules"))
    assert any("with penalties" in check.detail for check in checks if check.status == "fails")


def test_penalties_that_ignore_the_draft_are_found_in_texts(tmp_path: Path, forgetful_penalties: None):
    found = failing(prove_toy(tmp_path, ToyDraftConfig(), only=without_draws))
    assert any("penalties" in name for name in found)
    assert any("penalty" in name for name in found)
    assert not any("greedy, prompt" in name for name in found)  # those have none


# a stop string missed inside an accepted block


def test_a_stop_string_missed_inside_an_accepted_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pushed = TextStream.push
    extend = __import__("outrider.engine.events", fromlist=["extend"]).extend

    def careless(seq: Sequence, tokens: Any, stream: TextStream) -> Any:
        """Looks for stop strings only at the last token of a round."""
        inside = iter([*[False] * (len(tokens) - 1), True])

        def push(self: TextStream, token: int, *, may_stop: bool = True) -> str:
            return pushed(self, token, may_stop=may_stop and next(inside))

        with monkeypatch.context() as patched:
            patched.setattr(TextStream, "push", push)
            return extend(seq, tokens, stream)

    monkeypatch.setattr("outrider.engine.engine.extend", careless)
    checks = prove_toy(tmp_path, only=lambda key: key == "rounding" or key.endswith("stops"))
    found = failing(checks)
    assert any("stop string" in name for name in found)
    assert not any("stop token" in name for name in found)


# a tree child scored with its sibling's prefix


class SiblingsPrefix(FewLetters):
    """Scores the children of a second child as if they followed the first."""

    def score(self, spans: Any, after: Any = None) -> Any:
        return super().score([span._replace(draft=_mixed_up(span.draft)) for span in spans], after)


class _MixedUp(Draft):
    __slots__ = ()

    def path(self, node: int) -> tuple[int, ...]:
        right = super().path(node)
        return tuple(min(c for c in self.children(self.parent(n)) if c <= n) if n != node else n for n in right)


def _mixed_up(draft: Draft) -> Draft:
    return draft if draft.is_chain else _MixedUp(draft.tokens, draft.parents, draft.probs)


def test_a_tree_child_scored_with_its_siblings_prefix_is_found_whatever_drafts(tmp_path: Path):
    """Also where the drafter itself drafts chains alone."""
    found = failing(prove_toy(tmp_path, "suffix", SiblingsPrefix(), only=without_draws))
    assert found
    assert all("known texts as drafts" in name for name in found)
