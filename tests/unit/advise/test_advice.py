"""Predictions from given times and acceptance, the decision, and what is written for other engines."""

import json
from statistics import stdev

import pytest

from outrider.advise.advice import Advice, Verified, decide, drafter_bytes, why_not
from outrider.advise.export import Choice, export_to, vllm_config
from outrider.advise.measure import Runs, Scope
from outrider.advise.measured import Acceptance, Measured, RoundTimes
from outrider.advise.page import advice_page, configurations, summary
from outrider.bench.measure import Measurement
from outrider.drafters.speculative_config import from_vllm
from outrider.engine.stats import Times

SCOPE = Scope(((1, 2, 3),), (0.0, 1.0), (1, 4), (), 32)


def made(draft=1.0, verify=(10.0, 11.0, 14.0), first=0.7, batch_verify=(20.0, 40.0, 80.0), name="draft-model:model=x"):
    """Drafts of up to 4, each position accepted with chance `first`; milliseconds of plain, 1 and 4 draft tokens."""
    accepted = tuple(first**i for i in range(1, 5))
    found = Measured(name, 4, (0, 1, 4), answer_tokens=30.0)
    found.acceptance = {
        (t, n): Acceptance((1.0,) * n + (0.0,) * (4 - n), accepted[:n] + (0.0,) * (4 - n))
        for t in (0.0, 1.0)
        for n in (1, 4)
    }
    for batch, times in ((1, verify), (4, batch_verify)):
        for length, time in zip((0, 1, 4), times, strict=True):
            found.rounds[0.0, batch, 0, length] = RoundTimes(draft * length / 1e3, time / 1e3, 0.0)
            if batch == 1:
                found.rounds[1.0, 1, 0, length] = found.rounds[0.0, 1, 0, length]
    return found


def test_a_prediction_is_tokens_over_time():
    found = made()
    # a draft of 2: between 12 ms of 1 and 18 ms of 4; 1 + 0.7 + 0.49 tokens
    assert found.round_seconds(0.0, 1, 2) == pytest.approx(0.014)
    assert found.speedup(0.0, 1, 2) == pytest.approx(2.19 * 10 / 14)
    assert found.speedup(0.0, 1, 4) == pytest.approx((1 + 0.7 + 0.49 + 0.343 + 0.2401) * 10 / 18)
    by_hand = {k: found.speedup(0.0, 1, k) for k in (1, 2, 3, 4)}
    assert found.best_length(0.0, 1) == max(by_hand, key=by_hand.get)
    assert found.best_speedup(0.0, 4) < 1 <= found.best_speedup(0.0, 1)
    assert found.break_even(0.0) == 1
    assert made(first=0.05).break_even(0.0) is None


def test_tokens_of_a_length_between_two_that_were_run():
    found = made()
    # drafts of 1 bring 1.8 tokens a round, of which a cut of the drafts of 4 shows 1.7; a third of the way to 4
    found.acceptance[0.0, 1] = Acceptance((1.0, 0.0, 0.0, 0.0), (0.8, 0.0, 0.0, 0.0))
    assert found.tau(0.0, 1) == pytest.approx(1.8)
    assert found.tau(0.0, 2) == pytest.approx(2.19 * (1 + (1.8 / 1.7 - 1) * 2 / 3))
    assert found.tau(0.0, 4) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert found.tau(1.0, 2) == pytest.approx(2.19)


def test_rounds_at_a_temperature_that_was_timed_in_one_batch():
    found = made()
    for length, time in zip((0, 1, 4), (11.0, 13.0, 27.0), strict=True):
        found.rounds[1.0, 1, 0, length] = RoundTimes(0.0, time / 1e3, 0.0)
    assert found.round_seconds(1.0, 1, 4) == pytest.approx(0.027)
    # at batch 4 and temperature 0: 84 ms; a round of 4 draft tokens takes 27 / 18 of that at temperature 1
    assert found.round_seconds(1.0, 4, 4) == pytest.approx(0.084 * 27 / 18)


def test_a_length_that_is_timed_again_predicts_by_its_new_times():
    """On a machine that is half as fast meanwhile; drafts of 2 take 26 ms there, and 2.3 tokens come of a round."""
    found = made()
    before = {length: found.speedup(0.0, 1, length) for length in (1, 4)}
    found.acceptance[0.0, 2] = Acceptance((1.0, 1.0, 0.0, 0.0), (0.75, 0.55, 0.0, 0.0))
    found.time_again(0.0, 1, {0: RoundTimes(0.0, 0.020, 0.0), 2: RoundTimes(0.002, 0.024, 0.0)})
    assert found.speedup(0.0, 1, 2) == pytest.approx(2.3 * 20 / 26)
    assert found.round_seconds(0.0, 1, 4) == pytest.approx(0.036)
    assert {length: found.speedup(0.0, 1, length) for length in (1, 4)} == pytest.approx(before)
    assert found.round_seconds(0.0, 4, 2) == pytest.approx(0.041 + (0.084 - 0.041) / 3), "other cells are as they were"


def test_cells_of_a_scope():
    scope = Scope(((1,),), (0.0, 0.5, 1.0), (1, 4, 8), (), 8)
    assert scope.cells == [(0.0, 1), (0.0, 4), (0.0, 8), (0.5, 1), (1.0, 1)]


def test_groups_are_full():
    scope = Scope(((1,), (2,), (3,)), (0.0,), (1, 2), (), 8)
    assert scope.groups(2) == [[(1,), (2,)], [(3,), (1,)]]
    assert scope.groups(1) == [[(1,)], [(2,)], [(3,)]]
    assert scope.groups(4) == [[(1,), (2,), (3,), (1,)]]


def window(seconds, rounds=10):
    return Measurement(1, rounds=rounds, seconds=seconds, times=Times(draft=seconds / 4, verify=seconds / 2))


def test_times_are_the_median_of_each_group_and_their_error_is_of_the_ratio():
    runs = Runs.__new__(Runs)
    runs.done = {
        0: [[window(1.0), window(3.0, 20)], [window(9.0), window(3.0, 20)], [window(1.0), window(3.0, 20)]],
        2: [[window(2.0), window(6.0, 20)], [window(2.0), window(6.0, 20)], [window(2.0), window(6.0, 20)]],
    }
    assert runs.times(0).total == pytest.approx(4.0 / 30), "the stall of the second repetition does not count"
    assert runs.times(2).draft == pytest.approx(8.0 / 30 / 4)
    ratios = [2.0, (0.2 + 0.3) / (0.9 + 0.15), 2.0]
    assert runs.error(2) == pytest.approx(2 * stdev(ratios) / 3**0.5 / (sum(ratios) / 3))
    assert runs.error(0) == 0


def test_chances_by_position():
    found = Acceptance(drafted=(0.5, 0.4, 0.1), accepted=(0.4, 0.1, 0.1))
    # half of the rounds draft; of 0.4 that are accepted and may go on, 0.4 did
    assert found.conditional == pytest.approx([0.4 / 0.5, 0.1 / 0.4, 0.1 / 0.1])
    assert found.tau(2) == pytest.approx(1.5)


def test_what_was_measured_survives_a_file():
    found = made()
    again = Measured.from_json(json.loads(json.dumps(found.as_json())))
    assert again == found


def verified(measured, *, identical=True, length=2, name="draft-model:model=x"):
    return Verified(name, length, 0.0, 1, 1.5, measured, 0.02, 2.1, identical, 3)


def test_the_fastest_that_changes_nothing_is_chosen():
    advice = Advice("t", {}, [made(), made(name="suffix")])
    advice.verified = [verified(1.4), verified(1.6, name="suffix", identical=False), verified(1.2, length=None)]
    decide(advice, SCOPE)
    assert advice.chosen is not None
    assert advice.chosen.measured == 1.4
    assert "up to a batch of 1" in advice.reasons[1]
    assert advice.as_json()["speculate"] is True
    assert "1.40 x" in summary(advice)


def test_no_gain_no_speculation_and_why():
    advice = Advice("t", {}, [made(draft=4.0, verify=(10.0, 16.0, 40.0), first=0.3)])
    advice.verified = [verified(1.01), verified(1.9, identical=False, name="suffix")]
    decide(advice, SCOPE)
    assert advice.chosen is None
    said = " ".join(advice.reasons)
    for words in ("suffix: some texts differ", "30% of rounds", "40% of a plain round", "of a pass: arithmetic"):
        assert words in said, words
    assert summary(advice).startswith("Do not speculate")
    assert "--drafter none" in advice_page(advice)
    short = made(first=0.9)
    short.answer_tokens = 9
    assert "9 tokens" in " ".join(why_not(Advice("t", {}, [short]), SCOPE))
    assert why_not(Advice("t", {}), SCOPE) == ["no drafter fits this target"]


def test_a_speed_up_that_its_tokens_cannot_bring_is_not_believed():
    """Times of a machine that others use: 1.31 x with 1.00 tokens a pass is no gain."""
    advice = Advice("t", {}, [made(name="prompt-lookup")])
    advice.verified = [Verified("prompt-lookup", None, 0.0, 1, None, 1.31, 0.06, 1.0, True, 3)]
    decide(advice, SCOPE)
    assert advice.chosen is None
    said = " ".join(advice.reasons)
    assert "1.31 x plain decoding (± 6%), 1.00 tokens a pass: no clear gain" in said
    assert "other programs disturbed the times" in said


def test_a_speed_up_within_its_error_is_not_believed():
    advice = Advice("t", {}, [made()])
    advice.verified = [Verified("draft-model:model=x", 2, 0.0, 1, 1.5, 1.1, 0.14, 2.1, True, 3)]
    decide(advice, SCOPE)
    assert advice.chosen is None
    advice.verified = [Verified("draft-model:model=x", 2, 0.0, 1, 1.5, 1.1, 0.05, 2.1, True, 3)]
    decide(advice, SCOPE)
    assert advice.chosen is not None
    assert "disturbed" not in " ".join(advice.reasons)


def test_the_page_holds_what_was_found():
    advice = Advice("t<b>", {"device": "CPU"}, [made(), made(name="suffix", draft=0.0)], {"mtp": "no module"})
    advice.verified = [verified(1.4)]
    decide(advice, SCOPE)
    text = advice_page(advice)
    for words in (
        "1.40 x",
        "Measured: 3 runs of all prompts",
        "t&lt;b&gt;",
        "no module",
        "Speed-up by batch",
        "as fast as plain",
        "--speculative-config",
    ):
        assert words in text, words
    assert "<b>" not in text.replace("<b>Use", "")


@pytest.mark.parametrize(
    ("drafter", "method"),
    [("suffix", "suffix"), ("prompt-lookup", "ngram"), ("draft-model:model=small", "draft_model")],
)
def test_vllms_configuration_is_one_that_asks_for_the_same(drafter, method):
    choice = Choice("big", drafter, 5)
    config = vllm_config(choice)
    assert config is not None
    assert config["method"] == method
    assert from_vllm(config).traits.name == drafter.partition(":")[0]
    assert from_vllm(config).traits.max_tokens == 5
    command = export_to("vllm", choice).command
    assert json.loads(command.split("'")[1]) == config


def test_other_engines():
    told = dict(configurations(Choice("t", "prompt-lookup", 5)))
    assert "--speculative-algorithm NGRAM" in told["sglang"]
    assert 'decoding_type: "NGram"\n' in told["tensorrt-llm"]
    assert "--target FILE.gguf" in told["llama.cpp"]
    assert dict(configurations(Choice("t", "layer-skip", 5)))["vllm"].startswith("vLLM has no counterpart")


def test_memory_is_that_of_the_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert drafter_bytes(Choice("t", f"eagle:model={tmp_path},tree=24", 5)) == 1000
    assert drafter_bytes(Choice("t", "eagle:tree=24", 5, shipped=str(tmp_path))) == 1000
    assert drafter_bytes(Choice("t", "suffix", 5, shipped=str(tmp_path))) == 0
