"""What every client is asked for, and what the offline engine, which drafts nothing, answers to the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from server_world import END, NAME, Running, ToyWriter, make_llm, make_tokenizer, until

from outrider.core.sampling import SamplingParams
from outrider.engine.results import Result
from outrider.grammar import tool_constraint
from outrider.server.queue.observers import SequenceFinished

Serve = Callable[..., Running]
"""What the fixture `serve` gives."""
TOKENIZER = make_tokenizer()
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me of the sea"}]
SEED = 28  # its text is all whole characters, one of them of two tokens
MAX_TOKENS = 24
ASK: dict[str, Any] = {"messages": MESSAGES, "seed": SEED, "max_tokens": MAX_TOKENS}
LONG = "a" * 300  # more than the toy's context of 256
ENDLESS = {str(END): -100}  # a logit bias: the text never ends of itself
NO_SPACE = {"32": -100, "10": -100}  # the toy likes spaces so much that its JSON would be nothing else

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


def offline(
    messages: list[Any] = MESSAGES, *, response_format: Any = None, constraint: Any = None, **given: Any
) -> Result:
    """The answer of an engine of its own, without a server and without drafts."""
    options = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": SEED} | given
    params = SamplingParams(**options)
    return make_llm(drafter="none").chat(messages, params, response_format=response_format, constraint=constraint)


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


@dataclass
class Watched:
    """A server for a long answer, and how the texts asked of it ended."""

    running: Running
    ended: list[SequenceFinished]

    def expect_cancelled(self) -> None:
        """The one text was given up before its end, and nothing of it is left."""
        until(lambda: self.ended)
        assert [each.event.finish for each in self.ended] == ["cancelled"]
        snapshot = self.running.engine_thread.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.pages_used) == (0, 0, 0)
        self.running.llm.engine.check()
        answer = self.running.post("/v1/completions", prompt="a", max_tokens=1)
        assert answer.status_code == 200


LONG_TOKENS = 8000


def watched(serve: Serve) -> Watched:
    """Such a server; its answers of LONG_TOKENS take far longer than a client takes to leave."""
    running = serve(ToyWriter(context=LONG_TOKENS + 1000, cache_tokens=LONG_TOKENS + 2000))
    ended: list[SequenceFinished] = []

    def tell(what: object) -> None:
        if isinstance(what, SequenceFinished):
            ended.append(what)

    running.engine_thread.observers.append(tell)
    return Watched(running, ended)


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
