"""What every client is asked for, and what the offline engine, which drafts nothing, answers to the same.

The server is this package's with a toy model, or, with OUTRIDER_TEST_CLIENTS=vllm, `serve --engine vllm` with the real
vLLM (client_vllm.py). There texts are greedy, since vLLM's seeds are its own; calls and JSON are held to their schema,
since its grammars allow other spaces; and what vLLM cannot do is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import client_vllm
import jsonschema
from server_world import END, NAME, Running, ToyWriter, make_llm, make_tokenizer, start, until

from outrider.core.sampling import SamplingParams
from outrider.engine.results import Result
from outrider.grammar import tool_constraint
from outrider.llm import LLM
from outrider.server.queue.observers import SequenceFinished

VLLM = os.environ.get("OUTRIDER_TEST_CLIENTS") == "vllm"


class Served(Protocol):
    """A server that answers, as the fixture `served` gives it."""

    url: str


Serve = Callable[..., Any]
"""What the fixture `serve` gives: a server of one's own, with these settings."""
TOKENIZER = make_tokenizer()
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me of the sea"}]
SEED = 28  # its text is all whole characters, one of them of two tokens
MAX_TOKENS = 24
TEMPERATURE = 0.0 if VLLM else 1.0
ASK: dict[str, Any] = {"messages": MESSAGES, "seed": SEED, "max_tokens": MAX_TOKENS}
ASK |= {"temperature": TEMPERATURE} if VLLM else {}  # 1 where it is left out
CONTEXT = client_vllm.CONTEXT if VLLM else 256
LONG = "a" * (CONTEXT + 44)  # more than the context
TIMEOUT = 300 if VLLM else 30
LOGPROB_ERROR = 1e-3 if VLLM else 1e-5
# Logit biases, which vLLM takes none of while it drafts; the model there needs none.
ENDLESS = {} if VLLM else {str(END): -100}  # the text never ends of itself
NO_SPACE = {} if VLLM else {"32": -100, "10": -100}  # the toy likes spaces so much that its JSON would be nothing else

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "sky"]}, "times": {"enum": [1, 2, 3]}},
    "required": ["at", "times"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Look somewhere.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "wait", "description": "Do nothing.", "parameters": PARAMETERS}},
]
NAMED: Any = {"type": "function", "function": {"name": "wait"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "glance", "schema": PARAMETERS, "strict": True}}


def one_tool(name: str) -> list[Any]:
    """A function of these parameters alone, as clients send it for a structured answer."""
    return [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}}]


def judge() -> LLM:
    """The engine that answers without a server and without drafts."""
    return client_vllm.judge() if VLLM else make_llm(drafter="none")


def offline(
    messages: list[Any] = MESSAGES, *, response_format: Any = None, constraint: Any = None, **given: Any
) -> Result:
    """The judge's answer to what clients ask."""
    options = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "seed": SEED} | given
    params = SamplingParams(**options)
    return judge().chat(messages, params, response_format=response_format, constraint=constraint)


def refused(name: str) -> str:
    """What a refusal of something that vLLM lacks says."""
    return f"{name} is not offered with this engine"


def expect_seeded(first: str, again: str, other: str) -> None:
    """Texts at temperature 1 of SEED, of SEED again, and of the next one. vLLM repeats none while it drafts."""
    assert first != other
    if not VLLM:
        assert first == again
        assert [first, other] == [offline(seed=seed).text for seed in (SEED, SEED + 1)]


def told_length(messages: list[Any]) -> str:
    """The number of tokens of a prompt that is too long, as its refusal says; vLLM counts no further than it must."""
    return str(CONTEXT + 1 if VLLM else len(TOKENIZER.encode_chat(messages)))


def expect_two(texts: list[str]) -> None:
    """The two choices of a request with n=2 at temperature 1."""
    first, second = texts
    assert first != second
    if not VLLM:
        wanted = offline(n=2)
        assert texts == [wanted.text, wanted.others[0].text]


def expect_json(value: Any) -> None:
    """A value of FORMAT."""
    jsonschema.validate(value, PARAMETERS)
    if not VLLM:
        assert value == offline_json()


def finish_of(choice: Any) -> str:
    """How a response ends that calls a tool: vLLM, like OpenAI, says `stop` where the function is named."""
    return "stop" if VLLM and isinstance(choice, dict) else "tool_calls"


def expect_call(
    called: tuple[str, dict[str, Any]], choice: Any = "required", tools: list[Any] = TOOLS, **given: Any
) -> None:
    """A call of one of the tools, by this choice."""
    name, arguments = called
    jsonschema.validate(arguments, PARAMETERS)
    names = [choice["function"]["name"]] if isinstance(choice, dict) else [tool["function"]["name"] for tool in tools]
    assert name in names
    if not VLLM:
        assert called == offline_call(choice, tools, **given)


def offline_json() -> dict[str, Any]:
    bias = {int(token): bias for token, bias in NO_SPACE.items()}
    value = json.loads(offline(response_format=FORMAT, max_tokens=100, logit_bias=bias).text)
    jsonschema.validate(value, PARAMETERS)
    return value


def offline_call(choice: Any, tools: list[Any] = TOOLS, **given: Any) -> tuple[str, dict[str, Any]]:
    """The one call of the answer: which function, and its arguments."""
    constraint, _ = tool_constraint(tools, choice, TOKENIZER)
    call = json.loads(offline(constraint=constraint, **{"max_tokens": 100} | given).text)
    jsonschema.validate(call["arguments"], PARAMETERS)
    return call["name"], call["arguments"]


def offline_logprobs(top: int) -> list[tuple[bytes, float, list[float]]]:
    """Each token's bytes, its log-probability, and those of the likeliest at its place."""
    return [
        (
            b"<|end|>" if each.token == END else bytes([each.token]),
            each.logprob,
            [logprob for _, logprob in each.top],
        )
        for each in offline(logprobs=top).logprobs
    ]


def a_stop() -> str:
    """Two letters that stand together in the answer, and before which it has others."""
    text = offline().text
    return next(text[i : i + 2] for i in range(4, len(text) - 2) if text.index(text[i : i + 2]) == i)


class LongServer(Protocol):
    """A server of one's own for an answer of LONG_TOKENS, which takes far longer than a client takes to leave."""

    url: str

    def wait_begun(self) -> None:
        """Until the model has begun to write."""
        ...

    def expect_cancelled(self) -> None:
        """The one text was given up before its end, and nothing of it is left."""
        ...


@dataclass
class Watched:
    """A server of the toy, and how the texts asked of it ended."""

    running: Running
    ended: list[SequenceFinished]
    url: str

    def wait_begun(self) -> None:
        assert self.running.target.entered.wait(20)

    def expect_cancelled(self) -> None:
        """The one text was given up before its end, and nothing of it is left."""
        until(lambda: self.ended)
        assert [each.event.finish for each in self.ended] == ["cancelled"]
        snapshot = self.running.engine_thread.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.pages_used) == (0, 0, 0)
        self.running.llm.engine.check()
        answer = self.running.post("/v1/completions", prompt="a", max_tokens=1)
        assert answer.status_code == 200


LONG_TOKENS = CONTEXT - 500 if VLLM else 8000


def watched(serve: Serve) -> LongServer:
    if VLLM:
        return serve()
    running = serve(ToyWriter(context=LONG_TOKENS + 1000, cache_tokens=LONG_TOKENS + 2000))
    ended: list[SequenceFinished] = []

    def tell(what: object) -> None:
        if isinstance(what, SequenceFinished):
            ended.append(what)

    running.engine_thread.observers.append(tell)
    return Watched(running, ended, running.url)


@contextmanager
def server() -> Iterator[Served]:
    """A server with all defaults, and no key."""
    if VLLM:
        with client_vllm.serve_vllm(str(client_vllm.model_folder()), name=NAME) as process:
            yield process
        return
    running = start()
    yield running
    running.stop()


@contextmanager
def servers(behind: Served | None = None) -> Iterator[Serve]:
    """Makes servers, which are stopped at the end. behind: the one with vLLM that they stand before."""
    with ExitStack() as stack:

        def call(*args: Any, **options: Any) -> Any:
            if isinstance(behind, client_vllm.Process):
                return stack.enter_context(client_vllm.ready(client_vllm.RemoteServer(behind, **options)))
            running = start(*args, **options)
            stack.callback(running.stop)
            return running

        yield call


DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
DEMO_URL = "http://127.0.0.1:8000"
QUESTION = [{"role": "user", "content": "Tell me of the sea."}]  # what every piece of code there asks


def snippets(language: str, url: str) -> list[str]:
    """The document's pieces of code in a language, told of this server and its model in place of the demo's."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names = ((DEMO_URL, url), ('"demo"', f'"{NAME}"'), ('"openai/demo"', f'"openai/{NAME}"'))
    for old, new in (*names, ("model_name: demo", f"model_name: {NAME}")):
        found = [code.replace(old, new) for code in found]
    return found
