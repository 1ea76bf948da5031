"""First answers by length, on the toy model: each request is answered once, and the slow one is named."""

from __future__ import annotations

from pathlib import Path

from outrider.bench.stalls import OPTIONS, FirstAnswer, by_length, first_answers, mixed_requests
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.testing.synthetic_checkpoint import byte_tokenizer
from outrider.testing.toy import ToyRunner


def toy() -> LLM:
    runner = ToyRunner(257, context=512, cache_tokens=4096)
    return LLM(LoadedModel("toy", Path("toy"), runner, byte_tokenizer(257), "float32"), drafter="none", max_batch=4)


def test_every_request_has_one_first_answer_and_all_kinds_are_among_them():
    llm = toy()
    requests = mixed_requests(llm, 120, 400)
    answers = first_answers(llm, requests)
    assert sorted(answer.length for answer in answers) == sorted(len(request.prompt) for request in requests)
    kinds = {answer.what for answer in answers}
    assert {"constrained", "greedy", "temperature, top_p"} <= kinds
    assert len(kinds) == len(OPTIONS) + 1
    assert {answer.alone for answer in answers} == {True, False}
    llm.engine.check()
    assert llm.stats.shared_tokens > 100  # prefixes were found again
    assert llm.late_work.compilations == 0


def test_buckets_name_the_slowest_and_its_ratio_to_the_median():
    answers = [FirstAnswer(length, 0.01, "greedy") for length in (1, 5, 32, 33, 100)]
    slow = FirstAnswer(40, 0.05, "temperature")
    short, longer = by_length([*answers, slow, FirstAnswer(50, 9.0, "greedy", alone=False)])
    assert (short.low, short.high, short.count, short.ratio) == (1, 32, 3, 1.0)
    assert (longer.low, longer.high, longer.count, longer.slowest) == (33, 100, 3, slow)
    assert longer.ratio == 5.0
    assert "slowest 50.0 ms (5.0 times; 40 tokens, temperature)" in str(longer)
