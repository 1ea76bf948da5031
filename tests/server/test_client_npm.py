"""The npm `openai` package, unchanged, against a running server; judged by the offline engine.

npm installs it, and a newer node where the machine's own is too old, into pytest's cache folder. Where npm or its
registry cannot be reached the tests are skipped, and say so.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_world import (
    ASK,
    CONTEXT,
    ENDLESS,
    FORMAT,
    LOGPROB_ERROR,
    LONG,
    LONG_TOKENS,
    MESSAGES,
    NAMED,
    NO_SPACE,
    QUESTION,
    TIMEOUT,
    TOKENIZER,
    TOOLS,
    VLLM,
    LongServer,
    Served,
    a_stop,
    expect_call,
    expect_json,
    expect_seeded,
    expect_two,
    finish_of,
    offline,
    offline_logprobs,
    refused,
    servers,
    snippets,
    told_length,
    watched,
)
from server_world import NAME

CLIENTS = Path(__file__).parent / "clients"
NODE = 22  # the first that the package runs on
SECONDS = 120


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest) -> Path:
    """The folder with the packages; made once, and kept between runs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not on this machine")
    assert request.config.cache
    folder = request.config.cache.mkdir("npm-clients")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        wanted, made = _packages(), folder / "package.json"
        if not (folder / "done").exists() or made.read_text() != wanted:
            (folder / "done").unlink(missing_ok=True)
            made.write_text(wanted)
            _install(npm, folder)
            (folder / "done").touch()
    return folder


def _install(npm: str, folder: Path) -> None:
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--fetch-retries", "1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install the clients within {SECONDS} seconds")
    if done.returncode:
        pytest.skip(f"npm could not install the clients: {done.stderr[-300:]}")


def _packages() -> str:
    """What to install; a node only where the machine's own is too old."""
    packages = json.loads((CLIENTS / "package.json").read_text())
    if is_new(shutil.which("node")):
        del packages["dependencies"]["node"]
    return json.dumps(packages)


def is_new(node: str | None) -> bool:
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if node else ""
    version = re.match(r"v(\d+)", said)
    return version is not None and int(version[1]) >= NODE


def node_of(folder: Path) -> str:
    """A node that is new enough: the machine's own, else the one npm brought."""
    for name in (shutil.which("node"), shutil.which("node", path=str(folder / "node_modules/.bin"))):
        if name and is_new(name):
            return name
    pytest.skip(f"no node of version {NODE} or newer, and npm brought none")


@pytest.fixture(scope="module")
def long_server(served: Served) -> Iterator[LongServer]:
    with servers(served) as serve:
        yield watched(serve)


@pytest.fixture(scope="module")
def told(
    installed: Path, served: Served, long_server: LongServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the client was answered, case by case."""
    folder = tmp_path_factory.mktemp("npm")
    (folder / "node_modules").symlink_to(installed / "node_modules")
    shutil.copy(CLIENTS / "cases.mjs", folder)
    given = {
        "url": f"{served.url}/v1",
        "long_url": f"{long_server.url}/v1",
        "model": NAME,
        "ask": ASK,
        "stop": a_stop(),
        "tools": TOOLS,
        "named": NAMED,
        "format": FORMAT,
        "no_space": NO_SPACE,
        "long": LONG,
        "predicted": offline().text,
        "long_tokens": LONG_TOKENS,
        "endless": ENDLESS,
        "timeout": 1000 * TIMEOUT,
    }
    command = [node_of(installed), "cases.mjs"]
    done = subprocess.run(
        command, cwd=folder, input=json.dumps(given), capture_output=True, text=True, timeout=2 * TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def content(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


def test_models(told: dict[str, Any]):
    assert told["models"] == [NAME]


def test_a_whole_chat(told: dict[str, Any]):
    wanted = offline()
    assert content(told["whole"]) == wanted.text
    assert told["whole"]["usage"]["completion_tokens"] == len(wanted.tokens)


def expect_refused(answer: dict[str, Any], name: str) -> None:
    assert (answer["kind"], answer["status"], answer["code"]) == ("BadRequestError", 400, "not_supported")
    assert refused(name) in answer["message"]


def test_where_each_token_comes_from(told: dict[str, Any]):
    if VLLM:
        expect_refused(told["provenance"], "include_provenance")
        return
    told_by_token = told["provenance"]["choices"][0]["provenance"]
    assert tuple(each["token_id"] for each in told_by_token) == offline().tokens


def test_a_streamed_chat(told: dict[str, Any]):
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in told["streamed"])
    assert text == offline().text
    assert told["streamed"][-1]["choices"][0]["finish_reason"] == offline().finish_reason


def test_usage_in_a_stream(told: dict[str, Any]):
    *chunks, last = told["usage"]
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert VLLM or all("usage" in chunk for chunk in chunks)  # vLLM leaves it out
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(offline().tokens)
    assert last["usage"]["prompt_tokens"] == len(TOKENIZER.encode_chat(MESSAGES))


def test_two_choices(told: dict[str, Any]):
    expect_two([content(told["two"], i) for i in (0, 1)])


def test_the_same_seed_gives_the_same_text(told: dict[str, Any]):
    expect_seeded(*map(content, told["seeds"]))


def test_a_stop_string(told: dict[str, Any]):
    text = offline().text
    assert content(told["stop"]) == text[: text.index(a_stop())]
    assert told["stop"]["choices"][0]["finish_reason"] == "stop"


def test_logprobs(told: dict[str, Any]):
    scores, wanted = told["logprobs"]["choices"][0]["logprobs"]["content"], offline_logprobs(3)
    assert [bytes(each["bytes"]) for each in scores] == [token for token, _, _ in wanted]
    assert [each["logprob"] for each in scores] == pytest.approx(
        [logprob for _, logprob, _ in wanted], abs=LOGPROB_ERROR
    )
    for each, (_, _, top) in zip(scores, wanted, strict=True):
        assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(top, abs=LOGPROB_ERROR)


@pytest.mark.parametrize(("case", "choice"), [("tool_required", "required"), ("tool_named", NAMED)])
def test_tools(told: dict[str, Any], case: str, choice: Any):
    (call,) = told[case]["choices"][0]["message"]["tool_calls"]
    expect_call((call["function"]["name"], json.loads(call["function"]["arguments"])), choice)
    assert told[case]["choices"][0]["finish_reason"] == finish_of(choice)


def test_a_streamed_tool_call(told: dict[str, Any]):
    deltas = [
        delta["function"]
        for chunk in told["tool_streamed"]
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    arguments = json.loads("".join(delta.get("arguments", "") for delta in deltas))
    expect_call((deltas[0]["name"], arguments))


def test_a_json_schema(told: dict[str, Any]):
    expect_json(json.loads(content(told["schema"])))


def test_errors(told: dict[str, Any]):
    wrong, long = told["wrong_model"], told["too_long"]
    assert (wrong["kind"], wrong["status"], wrong["code"]) == ("NotFoundError", 404, "model_not_found")
    assert (long["kind"], long["status"], long["code"]) == ("BadRequestError", 400, "context_length_exceeded")
    assert str(CONTEXT) in long["message"]
    assert told_length([{"role": "user", "content": LONG}]) in long["message"]


def test_a_prediction_is_counted(told: dict[str, Any]):
    if VLLM:
        expect_refused(told["prediction"], "prediction")
        return
    wanted = offline().text
    assert content(told["prediction"]) == wanted
    details = told["prediction"]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > len(wanted) // 2


def test_leaving_a_stream_frees_the_request(told: dict[str, Any], long_server: LongServer):
    assert told["leave"] == "chat.completion.chunk"
    long_server.expect_cancelled()


@pytest.mark.parametrize("place", range(len(snippets("js", ""))))
def test_what_the_document_says_to_write(installed: Path, served: Served, tmp_path: Path, place: int):
    (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    (tmp_path / "ask.mjs").write_text(snippets("js", served.url)[place])
    command = [node_of(installed), "ask.mjs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert done.stdout == offline(QUESTION, temperature=0).text, done.stderr
