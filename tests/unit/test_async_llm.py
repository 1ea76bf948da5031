"""AsyncLLM: the same texts as LLM, many callers at once, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_first_calls import SHORT, Told, llm

from outrider import AsyncLLM
from outrider.core.errors import OutriderError, RequestError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Span
from outrider.loading.load import LoadedModel
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ToyRunner

LONG = SamplingParams(max_tokens=60, temperature=0.8, seed=4, ignore_eos=True)


def async_llm(target: ToyRunner | None = None, **options: Any) -> AsyncLLM:
    loaded = LoadedModel("toy", Path("toy"), target or ToyRunner(), Told(), "float32")  # pyright: ignore[reportArgumentType]
    return AsyncLLM(loaded, **options)


def test_many_callers_get_the_texts_of_llm():
    async def ask() -> list[Any]:
        async with async_llm(max_batch=3) as made:
            asked = [made.agenerate(prompt, LONG) for prompt in ("a", "bc", "def", "gh", "i")]
            found = await asyncio.gather(*asked, made.agenerate(["j", "k"], [LONG, SHORT]), made.achat("hi", SHORT))
            assert made.llm.engine.target.pool.used == 0
            return found

    *singles, batch, answer = asyncio.run(ask())
    plain = llm()
    assert [each.tokens for each in singles] == [plain.generate(p, LONG).tokens for p in ("a", "bc", "def", "gh", "i")]
    assert [each.tokens for each in batch] == [each.tokens for each in plain.generate(["j", "k"], [LONG, SHORT])]
    assert answer.tokens == plain.chat("hi", SHORT).tokens
    assert singles[0].seed == 4


def test_n_texts_and_none():
    async def ask() -> Any:
        async with async_llm() as made:
            assert await made.agenerate([]) == []
            return await made.agenerate("a", LONG, n=3)

    found, plain = asyncio.run(ask()), llm().generate("a", LONG, n=3)
    assert [each.tokens for each in (found, *found.others)] == [each.tokens for each in (plain, *plain.others)]
    assert [each.seed for each in (found, *found.others)] == [each.seed for each in (plain, *plain.others)]


def test_a_stream_and_leaving_it():
    async def ask() -> str:
        async with async_llm() as made:
            text = "".join([event.text async for event in made.astream("a", LONG)])
            stream = made.astream("bc", LONG)
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(made.agenerate("def", LONG, max_tokens=400))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(10):
                while made.llm.engine.target.pool.used:
                    await asyncio.sleep(0.01)
            return text

    assert asyncio.run(ask()) == llm().generate("a", LONG).text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda it: it.agenerate("a", max_new_tokens=3), "did you mean max_tokens"),
        (lambda it: it.agenerate([1, 999]), "token 999 does not exist"),
        (lambda it: it.agenerate(["a", "b"], [SHORT]), "1 SamplingParams for 2 prompts"),
        (lambda it: anext(it.astream("a", n=2)), "n=2; use agenerate"),
    ],
)
def test_what_cannot_be_is_said(call: Any, words: str):
    async def ask() -> None:
        async with async_llm() as made:
            with pytest.raises(RequestError, match=words):
                await call(made)
            assert (await made.agenerate("a", SHORT)).tokens

    asyncio.run(ask())


def test_closing_tells_those_who_wait_and_those_who_come_later():
    target = ToyRunner()

    async def ask() -> None:
        made = async_llm(target)
        stream = made.astream("a", replace(LONG, max_tokens=400))
        await anext(stream)
        await asyncio.to_thread(made.close)
        with pytest.raises(OutriderError, match="this AsyncLLM is closed"):
            async for _ in stream:
                pass
        with pytest.raises(OutriderError, match="closed; make a new one"):
            await made.agenerate("a")
        made.close()
        assert repr(made) == "<AsyncLLM: <LLM: closed>>"

    asyncio.run(ask())
    assert target.pool.used == 0


class Breaking(ToyRunner):
    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        raise RuntimeError("out of memory")


def test_a_fault_of_the_engine_reaches_the_caller():
    async def ask() -> None:
        async with async_llm(Breaking()) as made:
            for _ in range(2):
                with pytest.raises(OutriderError, match=r"RuntimeError\('out of memory'\)"):
                    await made.agenerate("a", SHORT)

    asyncio.run(ask())


def test_what_cannot_be_loaded_is_raised_at_once():
    with pytest.raises(OutriderError, match="no/such/folder"):
        AsyncLLM("no/such/folder")
