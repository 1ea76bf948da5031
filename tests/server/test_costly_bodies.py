"""Bodies that cost more than they may: refused with few words, spelled out once, measured before they are encoded."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from server_world import Running, ToyWriter, chunks_of, make_tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from outrider.core.outputs import TokenLogprob
from outrider.engine.request import CheckedRequest, Request
from outrider.models.tokenizer import Tokenizer
from outrider.server.openai import completion_response, http_responses, length_bounds, translate
from outrider.server.openai.field_types import ExtensibleModel
from outrider.server.openai.request_schema import ChatRequest, CompletionRequest, DetokenizeRequest
from outrider.server.openai.response_builder import ResponseMeta, ResponseOptions
from outrider.server.openai.token_texts import TokenTexts, byte_alphabet
from outrider.server.queue.jobs import Job, JobOwner

URL = "/v1/completions"
CHAT = [{"role": "user", "content": "x"}]
Serve = Callable[..., Running]
MANY = 20_000
UNK = "<unk>"
UNKNOWN = {f"k{i}": 1 for i in range(MANY)}


def problem(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text[:500]
    (error,) = response.json().values()
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


REFUSED = [
    (URL, CompletionRequest, {"prompt": ["a"] * MANY}, "prompt: List should have at most 1024 items"),
    (URL, CompletionRequest, {"prompt": [None] * MANY}, "prompt.0: Input should be a valid integer, or: "),
    (URL, CompletionRequest, {"prompt": [1] * MANY + ["a"]}, "prompt: Input should be a valid integer, or: "),
    (URL, CompletionRequest, {"prompt": [["a"] * 100] * 1000}, "Input should be a valid integer"),
    (URL, CompletionRequest, {"prompt": "a", "banned_token_ids": ["x"] * 4096}, "banned_token_ids.0"),
    (URL, CompletionRequest, {"prompt": "a", "allowed_token_ids": ["x"] * 4096}, "allowed_token_ids.0"),
    (URL, CompletionRequest, {"prompt": "a", "speculation": UNKNOWN}, "'k0' is no field of it; it takes drafter, max"),
    ("/detokenize", DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens.0: Input should be a valid integer"),
    (
        "/v1/chat/completions",
        ChatRequest,
        {"messages": CHAT, "response_format": {"type": "choice", "choice": [1] * 4096}},
        "response_format: Input should be a valid string",
    ),
    (
        "/v1/chat/completions",
        ChatRequest,
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}} | UNKNOWN}},
        "'k0' is no field of it; it takes name, description, schema, strict",
    ),
]


@pytest.mark.parametrize(("path", "kind", "body", "says"), REFUSED)
def test_a_refusal_writes_few_errors_whatever_the_length(
    served: Running, path: str, kind: type[ExtensibleModel], body: dict[str, Any], says: str
):
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 8
    error = problem(served.post(path, **body))
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).split(".")[0] in body


def test_an_unknown_field_cannot_write_the_refusal(served: Running):
    error = problem(served.post(URL, prompt="a", speculation={"{known}{name}": 1}))
    assert error["message"] == "speculation: '{known}{name}' is no field of it; it takes drafter, max_tokens, off"


def test_lists_within_their_bounds_are_taken_as_before():
    body = {"prompt": [[1, 2], [3]], "allowed_token_ids": [1, 2], "banned_token_ids": [], "stop": ["a"] * 4}
    taken = CompletionRequest.model_validate(body)
    assert (taken.prompt, taken.allowed_token_ids, taken.stop) == ([[1, 2], [3]], [1, 2], ["a"] * 4)
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "a", "allowed_token_ids": []})


def test_an_echo_alone_has_one_choice(served: Running):
    error = problem(served.post(URL, prompt="abc", echo=True, max_tokens=0, n=2))
    assert error["param"] == "n"
    assert "leave n out" in error["message"]
    assert len(served.post(URL, prompt="abc", echo=True, max_tokens=0, n=1).json()["choices"]) == 1


def test_what_echoes_may_make_of_an_answer_is_bounded(served: Running):
    prompts = [[97] * 240] * 250
    error = problem(served.post(URL, prompt=prompts, echo=True, max_tokens=0, logprobs=20))
    assert error["param"] == "echo"
    assert str(240 * 250 * 21) in error["message"]
    assert str(translate.MAX_ECHOED) in error["message"]
    assert served.post(URL, prompt=prompts[:2], echo=True, max_tokens=0, logprobs=20).status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ""},
        {"prompt": ["a", ""]},
        {"prompt": [99999]},
        {"prompt": [5_000_000, 104]},
        {"prompt": "hi", "allowed_token_ids": [99999]},
        {"prompt": "hi", "logit_bias": {"99999": 1}},
        {"prompt": "hi", "min_tokens": 500},
        {"prompt": "hi", "speculation": {"drafter": "bogus"}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_is_checked_like_any_completion(served: Running, more: dict[str, Any], stream: bool):
    alone = problem(served.post(URL, echo=True, max_tokens=0, stream=stream, **more))
    other = problem(served.post(URL, echo=True, max_tokens=1, **more))
    if "min_tokens" in more:
        assert alone["message"] == "min_tokens (500) is more than max_tokens (0)"
    else:
        assert alone == other


def _scores(count: int) -> list[TokenLogprob]:
    return [TokenLogprob(97 + i % 20, -0.5 - i, rank=2, top=((98, -0.25), (99, -2.0 - i))) for i in range(count)]


def _builder(count: int, n: int, texts: TokenTexts) -> completion_response.CompletionResponseBuilder:
    """Of an echo with nothing after it, as though there could be n of it."""
    scores = _scores(count)
    prompt = (96, *(score.token for score in scores))
    request = translate.TranslatedRequest((CheckedRequest(Request(prompt=prompt), len(prompt)),), (), n)
    echo = completion_response.EchoedPrompt(None, prompt, scores, texts)
    meta = ResponseMeta("text_completion", "cmpl-1", 0, "toy", "fp")
    return completion_response.CompletionResponseBuilder(meta, request, ResponseOptions(2), texts, [echo])


def test_an_echo_is_spelled_out_once_for_all_its_choices():
    texts, asked_for = TokenTexts(make_tokenizer()), []
    texts.text = lambda token, text=texts.text: asked_for.append(token) or text(token)  # type: ignore[assignment]
    response = _builder(300, 8, texts).response()
    assert len(asked_for) == 301 + 3 * 300  # each token, and at all places but the first the two likeliest and itself
    assert len(response["choices"]) == 8
    for choice in response["choices"]:
        lists = choice["logprobs"]
        assert lists["token_logprobs"] == [None, *(score.logprob for score in _scores(300))]
        assert lists["text_offset"] == list(range(301))
        assert "".join(lists["tokens"]) == choice["text"]
        assert lists["top_logprobs"][1] == {"b": -0.25, "a": -0.5, "c": -2.0}


def test_a_long_echo_is_streamed_in_pieces_that_add_up(serve: Serve):
    running = serve(ToyWriter(context=2048))
    body = {
        "prompt": [97 + i % 20 for i in range(700)],
        "echo": True,
        "logprobs": 1,
        "seed": 3,
        "max_tokens": 4,
        "n": 2,
    }
    wanted = running.post(URL, **body).json()["choices"]
    told: list[dict[str, Any]] = [{"text": "", "lists": {name: [] for name in wanted[0]["logprobs"]}} for _ in wanted]
    for chunk in chunks_of(running, URL, body | {"stream": True}):
        (choice,) = chunk["choices"]
        told[choice["index"]]["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            assert len(values) <= completion_response.ECHO_CHUNK_TOKENS
            told[choice["index"]]["lists"][name] += values
    assert [each["text"] for each in told] == [choice["text"] for choice in wanted]
    assert [each["lists"] for each in told] == [choice["logprobs"] for choice in wanted]
    assert len(wanted[0]["logprobs"]["tokens"]) == 704


def test_an_answer_that_tells_of_every_token_is_made_off_the_loop():
    made_in: list[int] = []

    class Watched(completion_response.CompletionResponseBuilder):
        def response(self) -> dict[str, Any]:
            made_in.append(threading.get_ident())
            return super().response()

    builder = _builder(300, 2, TokenTexts(make_tokenizer()))
    builder.__class__ = Watched

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    response = asyncio.run(http_responses.json_response(receive, None, builder, {"x-a": "b"}))
    assert made_in
    assert made_in[0] != threading.get_ident()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-a"] == "b"
    assert response.body == JSONResponse(builder.response()).body
    assert json.loads(bytes(response.body)) == builder.response()


def _count_encodes(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    encoded: list[str] = []
    encode = running.llm.tokenizer.encode

    def counted(text: str, **options: bool) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(running.llm.tokenizer, "encode", counted)
    return encoded


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        (URL, "prompt", {"prompt": "a" * 3000}),
        (URL, "prompt", {"prompt": ["a", "a" * 3000]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "a" * 3000}]}),
    ],
)
def test_what_can_never_fit_is_not_encoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, param: str, body: dict[str, Any]
):
    running = serve()
    encoded = _count_encodes(running, monkeypatch)
    error = problem(running.post(path, **body))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert "256 tokens" in error["message"]
    assert "at least 33" in error["message"]  # nine bytes have the longest token, <|start|>; a chat's is a bit longer
    assert encoded == []


def test_a_text_that_just_fits_is_taken_however_many_bytes_it_has(served: Running):
    assert served.post(URL, prompt="<|start|>" * 255, max_tokens=1).json()["usage"]["prompt_tokens"] == 255
    error = problem(served.post(URL, prompt="<|start|>" * 256, max_tokens=1))
    assert error["code"] == "context_length_exceeded"


def test_a_prediction_is_cut_before_it_is_encoded(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    running = serve()
    encoded = _count_encodes(running, monkeypatch)
    text = "etaoin shrdlu " * 80_000
    prediction = {"type": "content", "content": text}
    response = running.post(URL, prompt=[97, 98], prediction=prediction, max_tokens=20, seed=1)
    assert response.status_code == 200
    assert encoded == [text[: 256 * 16]]
    plain = running.post(URL, prompt=[97, 98], max_tokens=20, seed=1)
    assert response.json()["choices"] == plain.json()["choices"]


def test_a_prediction_is_encoded_once_for_all_prompts(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    running = serve()
    encoded = _count_encodes(running, monkeypatch)
    prediction = {"type": "content", "content": "sea"}
    response = running.post(URL, prompt=["a", "b", "c"], prediction=prediction, max_tokens=2)
    assert response.status_code == 200
    assert encoded == ["a", "b", "c", "sea"]


def _byte_level(missing: str = "", normalizer: Any = None, **options: Any) -> Tokenizer:
    """Bytes, and a few longer tokens; without those of `missing`."""
    chars = {char: byte for char, byte in byte_alphabet().items() if chr(byte) not in missing}
    longer = {"ab": 300, "abab": 301, "Ġ" * 2: 302, "Ġ" * 4: 303}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("Ġ" * 2, "Ġ" * 2)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=chars | longer, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|é|>", **options)])
    return Tokenizer(backend)


def _fallback(bytes_known: int = 256) -> Tokenizer:
    """As SentencePiece spells: letters, spaces as ▁, and bytes for all else; without all of those, unknown ones."""
    vocab = {token: i for i, token in enumerate([UNK, *(f"<0x{b:02X}>" for b in range(bytes_known)), *"ab▁", "ab"])}
    model = models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True, unk_token=UNK, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend)


def _words() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocab={UNK: 0}, unk_token=UNK)))


def _without_spaces() -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    return Tokenizer(made)


BOUNDED = {
    "bytes": _byte_level,
    "some bytes": lambda: _byte_level(missing="\x04x"),
    "NFC": lambda: _byte_level(normalizer=normalizers.NFC()),
    "fallback": _fallback,
    "the toy": make_tokenizer,
}
UNBOUNDED = {
    "lowercase": lambda: _byte_level(normalizer=normalizers.Lowercase()),
    "a shorter word": lambda: _byte_level(normalizer=normalizers.Replace("aa", "")),
    "a pattern": lambda: _byte_level(normalizer=normalizers.Replace(tokenizers.Regex("a+"), "a")),
    "some bytes, NFC": lambda: _byte_level(missing="x", normalizer=normalizers.NFC()),
    "strips": lambda: _byte_level(lstrip=True),
    "unknown bytes": lambda: _fallback(200),
    "words": _words,
    "no spaces": _without_spaces,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_is_said(name: str):
    tokenizer, dice = BOUNDED[name](), random.Random(5)
    parts = [
        "a",
        "ab" * 40,
        " " * 64,
        "<|é|>",
        "<|start|>",
        "\x04" * 50,
        "x",
        "é",
        "ΐ",
        "ι\u0308\u0301",
        "\u212a",
        "語",
    ]
    for _ in range(300):
        text = "".join(dice.choice(parts) * dice.randint(1, 5) for _ in range(dice.randint(0, 6)))
        assert length_bounds.min_token_count(text, tokenizer) <= len(tokenizer.encode(text, special=False)), text
    assert length_bounds.min_token_count("a" * 10_000, tokenizer) > 100


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_may_drop_text_has_no_bound(name: str):
    assert length_bounds.min_token_count("a" * 10_000, UNBOUNDED[name]()) == 0


def test_bytes_without_a_token_count_for_nothing():
    tokenizer = _byte_level(missing="\x04")
    assert tokenizer.encode("\x04" * 10_000) == []
    assert length_bounds.min_token_count("\x04" * 10_000, tokenizer) == 0


def test_a_prompt_has_no_generation_prompt_to_add(serve: Serve, served: Running):
    body = {"prompt": "hi", "add_generation_prompt": True}
    assert served.post("/tokenize", **body).headers["x-outrider-ignored"] == "add_generation_prompt"
    strict = serve(strict=True)
    assert problem(strict.post("/tokenize", **body))["param"] == "add_generation_prompt"
    assert strict.post("/tokenize", prompt="hi", add_generation_prompt=False).json()["tokens"] == [104, 105]
    ended = [
        strict.post("/tokenize", messages=CHAT, add_generation_prompt=yes).json()["count"] for yes in (True, False)
    ]
    assert ended[0] > ended[1]


def test_special_tokens_are_added_to_messages_where_that_is_asked_for(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    running = serve(strict=True)
    backend = tokenizers.Tokenizer.from_str(make_tokenizer().to_json())
    backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 257)])
    begun = Tokenizer(backend, templates={"default": make_tokenizer().template_text()})
    monkeypatch.setattr(running.llm, "tokenizer", begun)
    plain, bare, both = (
        running.post("/tokenize", messages=CHAT, **more).json()["tokens"]
        for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
    )
    assert plain == bare == begun.encode_chat(CHAT)
    assert both == [257, *plain]
    assert running.post("/tokenize", prompt="h").json()["tokens"] == [257, 104]


@pytest.mark.parametrize("blocked", [False, True])
def test_a_stream_left_before_its_first_byte_frees_its_job(blocked: bool):
    class Silent:
        def first_chunks(self):
            return iter(())

        last_chunks = first_chunks

    async def leave() -> list[Job]:
        cancelled: list[Job] = []
        sending = asyncio.Event()
        job = Job(cancelled.append, [object()], JobOwner("client"))  # type: ignore[list-item]

        async def receive() -> dict[str, Any]:
            await sending.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sending.set()
            if blocked:
                await asyncio.Future()

        await http_responses.stream_response(job, Silent(), {})({}, receive, send)  # type: ignore[arg-type]
        return cancelled

    assert asyncio.run(leave())


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"speculation": {"max_tokens": -1}}, "speculation.max_tokens"),
        ({"speculation": {"off": "maybe"}}, "speculation.off"),
        ({"speculation": 3}, "speculation"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_a_field_inside_another_is_named(serve: Serve, wish: dict[str, Any], param: str):
    told = problem(serve().post(URL, prompt="a", **wish))
    assert told["param"] == param
    assert told["message"].startswith(f"{param}: ")
