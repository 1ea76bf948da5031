"""The face people touch, on a toy target: generate, stream, chat, compare; and nothing is ever left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plain_decoding import Told
from testbed import PIECES, TOKENIZER
from torch import Tensor
from toy_world import TOY, target

from outrider.core.errors import ConfigError, OutriderError, RequestError
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Span
from outrider.engine.request import Request
from outrider.engine.results import Result
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ToyRunner

LONG = SamplingParams(max_tokens=30, temperature=0.7, seed=3, ignore_eos=True)


def llm(drafter: str = "suffix", made: ToyRunner | None = None, **options: Any) -> LLM:
    loaded = LoadedModel("toy", Path("toy"), made or target(), TOKENIZER, "float32")  # pyright: ignore[reportArgumentType]
    return LLM(loaded, drafter=drafter, **({"adaptive": False} | options))


def judged(text: str | Seq[Token], params: SamplingParams = LONG) -> list[Told]:
    prompt = TOKENIZER.encode(text) if isinstance(text, str) else text
    return TOY.judged(Request(prompt=tuple(prompt), params=params))


def told(result: Result) -> Told:
    return Told(result.tokens, result.text, result.finish_reason, result.stop_reason)


def assert_clean(tried: LLM) -> None:
    assert not tried.engine.busy
    tried.engine.check()
    assert tried.engine.target.pool.used == 0
    assert tried._calls.inbox == {}


def test_one_prompt_gives_one_result():
    tried = llm()
    for prompt in ("abc", TOKENIZER.encode("abc")):
        result = tried.generate(prompt, LONG)
        assert told(result) == judged("abc")[0]
        assert result.seed == 3
        assert len(result.pieces) == len(result.tokens) == len(result.provenance)
        assert "".join(result.pieces) == result.text
    assert_clean(tried)


def test_several_prompts_give_results_in_their_order():
    """They end at different times, in another order than they were asked in."""
    tried = llm()
    params = replace(LONG, ignore_eos=False, stop=("o", "p"))
    prompts = ["abc", "d", "ab ab ab", "fgh", "c", "pp", "é", "kkk", "ba", "d d"]
    results = tried.generate(prompts, params)
    assert [told(result) for result in results] == [judged(prompt, params)[0] for prompt in prompts]
    assert len({len(result.tokens) for result in results}) > 3
    by_ids = tried.generate([TOKENIZER.encode(prompt) for prompt in prompts], params)
    assert [told(result) for result in by_ids] == [told(result) for result in results]
    assert_clean(tried)


def test_no_prompts_give_no_results():
    tried = llm()
    assert tried.generate([]) == []
    assert_clean(tried)


def test_n_texts_each_with_its_seed():
    tried = llm()
    params = replace(LONG, n=3)
    result = tried.generate("abc", params)
    assert [told(one) for one in (result, *result.others)] == judged("abc", params)
    seeds = [one.seed for one in (result, *result.others)]
    assert len(set(seeds)) == 3
    for one, seed in zip((result, *result.others), seeds, strict=True):
        assert told(tried.generate("abc", replace(LONG, seed=seed))) == told(one)
    assert_clean(tried)


def test_a_drawn_seed_is_reported_and_repeats_the_text():
    tried = llm()
    params = replace(LONG, seed=None)
    result = tried.generate("abc", params)
    assert told(tried.generate("abc", replace(params, seed=result.seed))) == told(result)


def test_a_stream_yields_what_generate_returns():
    tried = llm("prompt-lookup")
    events = list(tried.stream("abc", LONG))
    assert "".join(event.text for event in events) == judged("abc")[0].text
    assert tuple(t for event in events for t in event.tokens) == judged("abc")[0].tokens
    assert [bool(event.finish) for event in events] == [False] * (len(events) - 1) + [True]
    assert_clean(tried)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_walking_away_from_a_stream_cancels_it(after: int):
    tried = llm()
    stream = tried.stream("abc", LONG)
    for _ in range(after):
        next(stream)
    assert tried.engine.busy == (after > 0)
    stream.close()
    assert_clean(tried)
    assert told(tried.generate("abc", LONG)) == judged("abc")[0]


def test_an_error_in_whoever_listens_cancels_the_stream():
    tried = llm()
    stream = tried.stream("abc", LONG)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())
    assert_clean(tried)


def test_streams_that_take_turns_do_not_mix():
    """Two in step, one of them dropped half-way, a third begun later, and a whole generate in between."""
    tried = llm()
    one, two = tried.stream("abc", LONG), tried.stream("d", LONG)
    texts = {"one": "", "two": "", "three": ""}
    for _ in range(5):
        texts["one"] += next(one).text
        texts["two"] += next(two).text
    assert told(tried.generate("fgh", LONG)) == judged("fgh")[0]
    two.close()
    three = tried.stream("é", LONG)
    for event in three:
        texts["three"] += event.text
        texts["one"] += "".join(event.text for event in [next(one, None)] if event)
    texts["one"] += "".join(event.text for event in one)
    assert texts["one"] == judged("abc")[0].text
    assert texts["three"] == judged("é")[0].text
    assert judged("d")[0].text.startswith(texts["two"])
    assert_clean(tried)


def test_a_stream_yields_one_text():
    tried = llm()
    with pytest.raises(RequestError, match="n=2; use generate"):
        next(tried.stream("abc", replace(LONG, n=2)))
    assert_clean(tried)


def test_a_stream_whose_text_was_cancelled_behind_its_back_does_not_spin(monkeypatch: pytest.MonkeyPatch):
    """It ends, or says what happened; it must not wait for ever for an event that cannot come."""
    tried = llm()
    stream = tried.stream("abc", LONG)
    tried.engine.cancel(next(stream).seq_id)
    step, rounds = tried.engine.step, iter(range(100))

    def counted() -> list[Any]:
        assert next(rounds, None) is not None, "the stream spins"
        return step()

    monkeypatch.setattr(tried.engine, "step", counted)
    with suppress(OutriderError):
        assert next(stream, None) is None
    assert_clean(tried)


def test_chat_answers_what_the_template_writes():
    tried = llm()
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
    assert told(tried.chat(messages, LONG)) == judged("abc d ")[0]
    streamed = "".join(event.text for event in tried.stream(messages, LONG))
    assert streamed == judged("abc d ")[0].text
    assert_clean(tried)


@pytest.mark.parametrize("params", [LONG, replace(LONG, seed=None), replace(LONG, n=3), replace(LONG, temperature=0)])
def test_compare_answers_twice_alike_and_cold(params: SamplingParams):
    prompt = "ab ab ab ab ab ab ab ab ab ab"
    tried = llm("prompt-lookup")
    for _ in range(2):
        compared = tried.compare(prompt, params)
        assert compared.identical
        assert compared.first_difference is None
        assert compared.plain.stats.all.drafted == 0
        for result in (compared.plain, compared.speculative):
            assert [told(one) for one in (result, *result.others)] == judged(prompt, replace(params, seed=result.seed))
            assert result.stats.shared_tokens == 0
    assert tried.compare("ab").identical
    assert_clean(tried)


def test_compare_shows_speculation_at_work():
    compared = llm("prompt-lookup").compare("ab", SamplingParams(max_tokens=90, ignore_eos=True))
    assert compared.identical
    assert compared.speculative.stats.all.accepted > 20
    assert compared.speculative.stats.all.rounds < compared.plain.stats.all.rounds


def test_compare_calls_watch_with_every_event():
    seen: list[tuple[str, str]] = []
    tried = llm()
    compared = tried.compare("abc", LONG, watch=lambda which, event: seen.append((which, event.text)))
    for which, result in (("plain", compared.plain), ("speculative", compared.speculative)):
        assert "".join(text for kind, text in seen if kind == which) == result.text
    assert_clean(tried)


def test_an_error_in_whoever_watches_leaves_nothing_behind():
    tried = llm()

    def watch(which: str, event: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tried.compare("abc", LONG, watch=watch)
    assert_clean(tried)


@pytest.mark.parametrize("drafter", ["suffix", "prompt-lookup", "none", "suffix+prompt-lookup"])
def test_a_prediction_nobody_drafts_from_is_refused(drafter: str):
    tried = llm(drafter)
    for ask in (tried.generate, lambda *a, **k: next(tried.stream(*a, **k)), tried.compare):
        with pytest.raises(RequestError, match=r"no prediction; use 'prediction' or 'suffix\+prediction'"):
            ask("abc", LONG, prediction="ab")
    assert_clean(tried)


@pytest.mark.parametrize("drafter", ["prediction", "mix", "suffix+prediction"])
def test_a_prediction_speeds_up_what_it_foresees(drafter: str):
    answer = judged("abc", replace(LONG, temperature=0))[0]
    written = "".join(piece for piece in map(PIECES.__getitem__, answer.tokens) if len(piece) == 1)
    tried = llm(drafter)
    result = tried.generate("abc", replace(LONG, temperature=0), prediction=written)
    assert told(result) == answer
    assert result.stats.all.accepted > 0
    empty = tried.generate("abc", replace(LONG, temperature=0), prediction="")
    assert told(empty) == answer
    assert_clean(tried)


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (["abc", ""], {}),
        (["abc", "d"], {"max_draft": -1}),
        ([[1, 2], [1, 99]], {}),
        ([[1, 2], [3] * 160], {}),
        ([[1, 2], []], {}),
    ],
)
def test_a_prompt_that_is_refused_takes_nobody_along(prompts: Any, options: dict[str, Any]):
    tried = llm()
    open_stream = tried.stream("fgh", LONG)
    text = next(open_stream).text
    with pytest.raises(RequestError):
        tried.generate(prompts, LONG, **options)
    text += "".join(event.text for event in open_stream)
    assert text == judged("fgh")[0].text
    assert_clean(tried)


def test_options_nobody_knows_are_refused():
    tried = llm()
    with pytest.raises(RequestError, match="temprature"):
        tried.generate("abc", temprature=1)
    assert_clean(tried)


def test_a_text_that_fails_has_its_error_and_others_do_not():
    def touchy(tokens: Seq[Token], logits: Tensor) -> Tensor:
        if tokens[0] == 7 and len(tokens) > 4:
            raise ValueError("too long for me")
        return logits

    tried = llm()
    bad, good = tried.generate(["d", "abc"], replace(LONG, logits_processors=(touchy,)))
    assert bad.finish_reason == "error"
    assert "too long for me" in bad.error
    assert bad.tokens == judged("d")[0].tokens[:4]
    assert told(good) == judged("abc")[0]
    assert good.error == ""
    assert_clean(tried)


def test_a_target_that_breaks_leaves_nothing_behind():
    class Breaking(ToyRunner):
        passes = 0

        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            self.passes += 1
            if self.passes == 5:
                raise RuntimeError("out of memory")
            return super().score(spans, after)

    tried = llm(made=Breaking(len(PIECES), context=160))
    with pytest.raises(RuntimeError, match="out of memory"):
        tried.generate(["abc", "d"], LONG)
    assert_clean(tried)
    assert told(tried.generate("abc", LONG)) == judged("abc")[0]


def test_a_result_is_json_and_safe_html():
    tried = llm("prompt-lookup")
    params = replace(LONG, n=2, logprobs=2)
    result = tried.generate("abc", params)
    read = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert read["text"] == result.text
    assert read["tokens"] == list(result.tokens)
    assert len(read["others"]) == 1
    assert len(read["logprobs"]) == len(result.tokens)
    shown = replace(result, pieces=("<script>&", *result.pieces[1:]))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;&amp;" in shown


def test_the_figures_sum_what_was_answered():
    tried = llm()
    first, second = tried.generate(["abc", "d"], LONG)
    assert tried.stats.tokens == len(first.tokens) + len(second.tokens)
    assert tried.stats.prompt_tokens == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "sufix"}, "suffix"),
        ({"drafter": "suffix:kk=3"}, "kk"),
        ({"mode": "exact"}, "seeded, distribution"),
        ({"rule": "all"}, "block, token"),
        ({"max_batch": 0}, "max_batch must be a whole number from 1"),
    ],
)
def test_what_cannot_be_is_said_at_once(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        llm(**options)


def test_mode_distribution_through_the_face():
    tried = llm("prompt-lookup", mode="distribution")
    greedy = replace(LONG, temperature=0)
    assert told(tried.generate("abc", greedy)) == judged("abc", greedy)[0]
    texts = [told(llm("prompt-lookup", mode="distribution").generate("ab ab ab", LONG)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert_clean(tried)
