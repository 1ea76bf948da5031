"""Arbitration between scripted members."""

from dataclasses import dataclass

import pytest
import torch

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.drafters.base import Drafter, RoundView, TargetPass, Traits
from outrider.drafters.mix import Mix, MixConfig
from outrider.drafters.none import NoDraftConfig
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState


class Scripted(Drafter):
    """Proposes what it is told to, and notes what it sees."""

    def __init__(self, name, draft=EMPTY, **traits):
        self.traits, self.draft = Traits(name=name, max_tokens=4, **traits), draft
        self.asked, self.seen, self.forgotten = [], [], []

    def propose(self, view):
        self.asked.append([seq.id for seq in view.seqs])
        return [self.draft.first_nodes(k) for k in view.budgets]

    def observe(self, seqs, drafts, verdicts):
        self.seen.append((drafts[0], verdicts[0]))

    def forget(self, seq):
        self.forgotten.append(seq.id)


def draft(tokens, expected, source, **fields):
    return Draft(tuple(tokens), source=source, expected=expected, **fields)


def play(mix, seq, coming, budget=4):
    """One round: what the mix drafts, and the text goes on with `coming`."""
    (best,) = mix.propose(RoundView([seq], [budget]))
    kept = next((i for i, (a, b) in enumerate(zip(best.tokens, coming, strict=False)) if a != b), len(best.tokens))
    kept = min(kept, len(coming) - 1)
    seq.tokens += coming[: kept + 1]
    mix.observe([seq], [best], [Verdict(tuple(coming[: kept + 1]), tuple(range(kept)))])
    return best


def test_the_draft_that_expects_most_wins_and_keeps_its_name(make):
    a, b = Scripted("a", draft([1, 2], 0.5, "a")), Scripted("b", draft([3], 0.9, "b"))
    assert Mix([a, b], 1000).propose(RoundView([make([0])], [4]))[0].source == "b"
    assert Mix([b, a], 1000).propose(RoundView([make([0])], [4]))[0].source == "b"


def test_one_that_needs_a_prediction_is_asked_only_for_those_that_have_one(make):
    a, b = Scripted("a", draft([1], 0.5, "a")), Scripted("b", draft([3], 0.9, "b"), needs_prediction=True)
    plain, predicted = make([0]), make([0], prediction=(5, 6))
    mix = Mix([a, b], 1000)
    assert [each.source for each in mix.propose(RoundView([plain, predicted], [4, 4]))] == ["a", "b"]
    mix.propose(RoundView([plain], [4]))
    assert a.asked == [[plain.id, predicted.id], [plain.id]]
    assert b.asked == [[predicted.id]]
    assert not mix.traits.needs_prediction


def test_one_that_does_not_observe_is_shown_nothing_and_judged_all_the_same(make):
    a = Scripted("a", draft([1, 2], 2.0, "a"), observes=False)
    mix = Mix([a], 1000)
    for _ in range(3):
        play(mix, make([0]), [9])
    assert a.seen == []
    assert mix.members[0].mean_accepted < 4
    assert mix.traits.observes


def test_members_observe_the_verdicts_of_their_own_drafts(make):
    a, b = Scripted("a", draft([1, 2], 0.5, "a")), Scripted("b", draft([3, 4], 0.9, "b"))
    seq = make([0])
    won = play(Mix([a, b], 1000), seq, [3, 9])
    assert b.seen == [(won, Verdict((3, 9), (0,)))]
    assert a.seen == [(EMPTY, Verdict((3, 9), ()))]


def test_a_claim_that_does_not_come_true_loses_its_weight(make):
    boaster, modest = (
        Scripted("boaster", draft([1, 2, 3], 2.9, "boaster")),
        Scripted("modest", draft([7], 0.8, "modest")),
    )
    mix, seq = Mix([boaster, modest], 1000), make([0])
    winners = [play(mix, seq, [7, 8]).source for _ in range(60)]
    assert winners[0] == "boaster"
    assert set(winners[-20:]) == {"modest"}
    winners = [play(mix, seq, [1, 2, 3, 4]).source for _ in range(120)]
    assert set(winners[-20:]) == {"boaster"}  # judged while it did not win


def test_a_draft_is_judged_only_when_the_text_decides_it(make):
    long, short = Scripted("long", draft([1, 2, 3, 4], 2.0, "long")), Scripted("short", draft([1], 3.0, "short"))
    mix, seq = Mix([long, short], 1000), make([0])
    play(mix, seq, [1, 2])
    member = mix.members[0]
    assert member.open  # 1 2 agrees so far
    play(mix, seq, [3])
    play(mix, seq, [9])
    assert member.accepted / member.expected > 1  # three came true of two expected
    assert not [start for start, _ in member.open.values() if start == 1]


def test_a_tree_counts_the_branch_that_came(make):
    tree = draft([1, 5, 2, 6], 1.0, "tree", parents=(-1, -1, 0, 1))
    member = Scripted("tree", tree)
    mix = Mix([member], 1000)
    play(mix, make([0]), [5, 6, 0])
    before = mix.members[0].accepted
    mix = Mix([member], 1000)
    seq = make([0])
    mix.propose(RoundView([seq], [4]))
    seq.tokens += [5, 6, 0]
    mix.observe([seq], [tree], [Verdict((5, 6, 0), (1, 3))])
    assert mix.members[0].accepted == pytest.approx(8 * (1 - 1 / 64) + 2)
    assert before < mix.members[0].accepted


def test_a_member_that_runs_a_model_is_asked_last_and_only_where_it_may_do_better(make):
    model = Scripted("model", draft([1, 2], 1.2, "model"), runs_model=True)
    cheap = Scripted("cheap")
    seqs = [make([0]), make([0])]
    cheap.propose = lambda view: [draft([5], 3.5, "cheap") if seq.id == seqs[0].id else EMPTY for seq in view.seqs]
    mix = Mix([model, cheap], 1000)
    drafts = mix.propose(RoundView(seqs, [4, 4]))
    assert model.asked == [[seqs[0].id, seqs[1].id]]  # optimistic: it could deliver 4
    for _ in range(60):
        seqs[1].tokens += [1, 9]
        mix.observe([seqs[1]], [drafts[1]], [Verdict((1, 9), (0,))])
        drafts[1] = mix.propose(RoundView([seqs[1]], [4]))[0]
    model.asked.clear()
    assert [d.source for d in mix.propose(RoundView(seqs, [4, 4]))] == ["cheap", "model"]
    assert model.asked == [[seqs[1].id]]


def test_a_sampled_draft_is_never_dropped_for_another(make):
    probs = torch.full((1, 8), 1 / 8)
    sampled = Scripted("sampled", draft([3], 0.01, "sampled", probs=probs), runs_model=True)
    another = Scripted("another", draft([4], 3.9, "another", probs=probs), runs_model=True)
    cheap = Scripted("cheap", draft([5], 0.5, "cheap"))
    mix = Mix([sampled, another, cheap], 1000)
    assert mix.propose(RoundView([make([0])], [4]))[0].source == "sampled"
    assert another.asked == []


def test_a_zero_budget_asks_nobody(make):
    member = Scripted("a", draft([1], 0.5, "a"))
    assert Mix([member], 1000).propose(RoundView([make([0]), make([0])], [0, 0])) == [EMPTY, EMPTY]
    assert member.asked == []


def test_one_that_needs_a_prediction_sees_no_round_without_one(make):
    class Watching(Scripted):
        def watch(self, view):
            self.asked.append("watched")

    a, b = Watching("a", watches=True), Watching("b", watches=True, needs_prediction=True)
    mix, plain, predicted = Mix([a, b], 1000), make([0]), make([0], prediction=(5, 6))
    for seq in (plain, predicted):
        mix.watch(RoundView([seq], [0]))
        mix.observe([seq], [EMPTY], [Verdict((1, 2), (0,))])
    assert (a.asked, b.asked) == (["watched"] * 2, ["watched"])
    assert (a.seen, b.seen) == ([(EMPTY, Verdict((1, 2)))] * 2, [(EMPTY, Verdict((1, 2)))])


def test_forgetting_reaches_every_member_once(make):
    a, b = Scripted("a", draft([1], 0.5, "a")), Scripted("b", runs_model=True)
    mix, seq = Mix([a, b], 1000), make([0])
    mix.propose(RoundView([seq], [4]))
    mix.forget(seq)
    assert a.forgotten == b.forgotten == [seq.id]
    assert not mix.members[0].open


def test_an_empty_mix_is_refused_and_the_default_has_three(context):
    with pytest.raises(ConfigError, match="mix: of names no drafter"):
        MixConfig(of=())
    mix = MixConfig().build(context)
    assert [member.drafter.traits.name for member in mix.members] == ["suffix", "prompt-lookup", "prediction"]
    assert mix.traits.max_tokens == 15
    assert MixConfig(of=(NoDraftConfig(),)).build(context).traits.max_tokens == 0


def test_the_default_mix_follows_whoever_is_right(make, context):
    mix = MixConfig().build(context)
    seq = make([1, 2, 3], prompt_len=3, prediction=tuple(range(50, 90)))
    drafts = [play(mix, seq, list(range(50, 90))[seq.generated :][:20], 16) for _ in range(2)]
    assert {d.source for d in drafts} == {"prediction"}
    for _ in range(6):
        last = play(mix, seq, [200, 201, 202, 203, 204, 205], 16)
    assert last.source in ("suffix", "prompt-lookup")


# --- members that fail, follow and draft ahead --------------------------------------------------


def test_a_member_that_fails_ends_its_own_turn_only(make):
    class Failing(Scripted):
        def propose(self, view):
            raise RuntimeError("no")

        process = observe = forget = propose

    good, bad = Scripted("good", draft([1], 0.5, "good"), follows_target=True), Failing("bad", follows_target=True)
    mix, seq = Mix([bad, good], 1000), make([0])
    mix.process(TargetPass([seq], [], Scores(torch.empty(0, 8), []), None))
    assert play(mix, seq, [1, 2]).source == "good"
    mix.forget(seq)
    assert good.forgotten == [seq.id]
    assert mix.take_failures(seq.id) == 4
    assert mix.take_failures(seq.id) == 0


def test_a_malformed_draft_of_a_member_is_none(make):
    bad = Scripted("bad", draft([1, 2], 3.0, "bad", parents=(1, 0)))
    mix, seq = Mix([bad, Scripted("good", draft([5], 0.5, "good"))], 1000), make([0])
    assert [play(mix, seq, [5, 6]).source for _ in range(3)] == ["good"] * 3
    assert not mix.members[0].open


def test_traits_are_those_of_the_members():
    model = {"runs_model": True, "drafts_ahead": True, "follows_target": True, "states_probs": True}
    a, b = Scripted("a", taps=(3, 7), **model), Scripted("b", uses_prediction=True)
    assert Mix([b, a], 9).traits == Traits(
        name="b+a",
        max_tokens=4,
        aliases=("mix",),
        follows_target=True,
        states_probs=True,
        uses_prediction=True,
        taps=(3, 7),
        guards_itself=True,  # its members are guarded
    )
    both = Mix([a, Scripted("c", **model)], 9).traits
    assert both.runs_model
    assert both.drafts_ahead


def test_members_that_tap_different_layers_are_refused():
    @dataclass(frozen=True)
    class Tapping:
        taps: tuple[int, ...]

        @property
        def traits(self):
            return Traits(name=f"tap{self.taps[0]}", max_tokens=1, taps=self.taps)

        def build(self, context):
            raise NotImplementedError

    assert MixConfig(of=(Tapping((1, 2)), NoDraftConfig(), Tapping((1, 2)))).traits.taps == (1, 2)
    with pytest.raises(ConfigError, match="mix: tap1 and tap3 read different layers"):
        MixConfig(of=(Tapping((1, 2)), Tapping((3,))))


def test_ahead_of_the_host_members_observe_the_round_that_was_theirs(make):
    """Two rounds are proposed before the first is observed; another member wins each."""
    state = DeviceState(torch.tensor([1]), torch.tensor([[0, 0]]))
    ahead = {"drafts_ahead": True}
    a, b = Scripted("a", draft([1], 0.9, "a"), **ahead), Scripted("b", draft([2], 0.5, "b"), **ahead)
    mix, seq = Mix([a, b], 1000), make([0])
    (first,) = mix.propose(RoundView([seq], [4]))
    a.draft = EMPTY
    (second,) = mix.propose(RoundView([seq], [4], state))
    assert (first.source, second.source) == ("a", "b")
    for seen, token in ((first, 1), (second, 2)):
        seq.tokens += [token, 9]
        mix.observe([seq], [seen], [Verdict((token, 9), (0,))])
    assert [(d.source, v.path) for d, v in a.seen] == [("a", (0,)), ("", ())]
    assert [(d.source, v.path) for d, v in b.seen] == [("", ()), ("b", (0,))]
    b.propose = lambda view: None
    assert mix.propose(RoundView([seq], [4], state)) is None
