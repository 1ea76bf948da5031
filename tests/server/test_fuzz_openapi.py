"""schemathesis on the server's own document: what fits it, what does not, with keys and without.

Nothing is a 5xx, nothing an undocumented status, every answer is as the document says, and
what does not fit is refused. `make fuzz` runs more cases and prints what was answered.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from server_world import NAME, Running, ToyWriter, start, until

from outrider.server.openai.request_schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.openai.responses_request import ResponsesRequest

CASES = int(os.environ.get("FUZZ_CASES", "40"))  # of each route; `make fuzz` runs more
SEED = int(os.environ.get("FUZZ_SEED", "1"))
KEY = "a-key-for-fuzzing"
ROUTES = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /version",
    "GET /metrics",
)
WITHOUT_KEY = ("GET /health",)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
Operation = APIOperation[Any, Any, Any, Any]
AnyCase = Case[Any]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
PARTS = {  # (needs keys, sends one, mode): hundredths of the cases
    (False, False, POSITIVE): 40,
    (False, False, NEGATIVE): 25,
    (True, True, POSITIVE): 20,
    (True, True, NEGATIVE): 10,
    (True, False, POSITIVE): 5,
}
KNOWN = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
    for name in model.model_fields
)
RISKY = frozenset({"min_tokens", "allowed_token_ids", "best_of", "suffix", "tools", "tool_choice", "response_format"})
RISKY |= {"text"}
STRAY = st.dictionaries(st.from_regex(r"[A-Za-z-]{1,12}", fullmatch=True), st.text(max_size=20), max_size=3)
STRAY_HEADERS = st.dictionaries(
    st.from_regex(r"x-[a-z-]{1,12}", fullmatch=True), st.from_regex(r"[!-~]{0,40}", fullmatch=True), max_size=3
)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, Running]]:
    """One without keys and one with; texts are short because the context is."""
    both = {keys: _start(keys) for keys in (False, True)}
    yield both
    for running in both.values():
        until(lambda running=running: running.engine_thread.snapshot().pages_used == 0)
        assert running.engine_thread.state == "ready"
        running.llm.engine.check()
        running.stop()


@pytest.fixture(scope="module")
def tally() -> Iterator[dict[str, Counter[int]]]:
    """Statuses by route; shown at the end where more than the usual cases were asked for."""
    seen: dict[str, Counter[int]] = {}
    yield seen
    if "FUZZ_CASES" in os.environ:
        print(f"\n{'route':<28} {'cases':>6}  statuses (seed {SEED})")
        for route, statuses in seen.items():
            told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            print(f"{route:<28} {statuses.total():>6}  {told}")


def _start(keys: bool) -> Running:
    return start(ToyWriter(context=128, cache_tokens=8192), max_batch=16, api_keys=(KEY,) if keys else ())


def _document(running: Running, keys: bool) -> dict[str, Operation]:
    headers = {"Authorization": f"Bearer {KEY}"} if keys else {}
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json", headers=headers)
    found: list[Any] = list(schema.get_all_operations())
    return {each.ok().label: each.ok() for each in found}


def test_the_document_has_no_route_that_is_not_listed_here(servers: dict[bool, Running]):
    assert sorted(_document(servers[False], keys=False)) == sorted(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_sent_is_answered_as_documented(
    servers: dict[bool, Running], tally: dict[str, Counter[int]], route: str
):
    statuses = tally.setdefault(route, Counter())
    for (needs_key, sends_key, mode), hundredths in PARTS.items():
        operation = _document(servers[needs_key], needs_key)[route]
        mode = POSITIVE if operation.method == "get" else mode  # nothing to send, nothing to send wrongly
        seen: Counter[int] = Counter()
        ask = _asker(seen, {"Authorization": f"Bearer {KEY}"} if sends_key else {})
        _run(ask, operation, mode, -(-CASES * hundredths // 100))
        if needs_key and not sends_key:
            assert list(seen) == [200 if route in WITHOUT_KEY else 401]
        statuses += seen
    assert statuses.total() >= CASES
    assert 200 in statuses


def _asker(statuses: Counter[int], headers: dict[str, str]) -> Callable[..., None]:
    session = requests.Session()

    def ask(case: AnyCase, query: dict[str, str], more: dict[str, str]) -> None:
        response = case.call(session=session, headers=more | headers, params=query, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    return ask


def _run(ask: Callable[..., None], operation: Operation, mode: GenerationMode, cases: int):
    """Ask `cases` times. Where nothing varies in a request, its query and headers do."""
    made = operation.as_strategy(mode)
    if operation.label == "GET /v1/models/{name}":
        made = st.one_of(made, operation.as_strategy(mode, path_parameters={"name": NAME}))
    if mode is POSITIVE and operation.method == "post":
        made = st.one_of(made, made.map(_tamed), made.map(partial(_tamed, without=RISKY)))
    nothing = st.just({})
    stray = (STRAY, STRAY_HEADERS) if operation.method == "get" else (nothing, nothing)
    run = given(made, *stray)(ask)
    slow_or_large: Any = list(HealthCheck)  # what schemathesis makes is both
    limits = {"database": None, "deadline": None, "suppress_health_check": slow_or_large}
    run = settings(max_examples=cases, phases=[Phase.generate], **limits)(run)
    seed(SEED)(run)()


def _tamed(case: AnyCase, without: frozenset[str] = frozenset()) -> AnyCase:
    """The same request with less to refuse in it, so that the rest gets further than the first check."""
    if not isinstance(case.body, dict):
        return case
    body: dict[str, Any] = {name: value for name, value in case.body.items() if name in KNOWN - without}
    for message in body.get("messages") or ():
        message["content"] = message.get("content") or "hi"
    if body.get("prompt") == "":
        body["prompt"] = "hi"
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    case.body = body
    return case
