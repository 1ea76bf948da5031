"""Tokenizer and chat templates against Transformers on the same folders; errors and vocabulary checks by value."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from outrider.core.errors import ConfigError, RequestError
from outrider.models import chat_template as chat_module
from outrider.models.tokenizer import Tokenizer, check_same_vocabulary

FIXED = {"deadline": None, "derandomize": True}
LINES = ["the quick brown fox jumps over the lazy dog", "let x = f(y) + 12;", "naïve café 中文 👍"] * 4
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""
TOOLS = """{%- set ns = namespace(seen=0) %}
{%- if tools %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {{- message.tool_calls | tojson(indent=2) }}
    {%- endif %}
    {% generation %}{{ message.role }}: {{ message.content }}
    {% endgeneration %}
{%- endfor %}
{{ ns.seen }} {{ strftime_now('%Y') }} {{ enable_thinking | default('unset') }} {{ documents is none }}
{{ pad_token is defined }}
"""
TALK = [
    {"role": "system", "content": " Be brief <&> exact. "},
    {"role": "user", "content": "naïve 中文? <|im_end|>"},
    {"role": "user", "content": "skip"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"x": 1, "é": "<b>"}}]},
]
TOOL = [{"type": "function", "function": {"name": "f", "description": "does <f> & é", "parameters": {}}}]


def byte_level(lines: list[str] = LINES, specials: tuple[str, ...] = ("<s>", "<|im_start|>", "<|im_end|>")):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(lines, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return backend


def sentencepiece():
    """Llama-2's shape: a space before the text, bytes for what has no piece, <s> before all."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghij", "▁a", "▁b", "ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


CHATML_NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def save(folder: Path, backend: tokenizers.Tokenizer | None, **files: object) -> Path:
    """Write a model folder; `files` are JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def settings_of(names: dict[str, str], **more: object) -> dict[str, object]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", **names, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "chatml": (byte_level(), settings_of(CHATML_NAMES, chat_template=CHATML)),
        "llama3": (byte_level(), settings_of(CHATML_NAMES, chat_template=LLAMA3)),
        "tools": (byte_level(), settings_of(CHATML_NAMES, chat_template=TOOLS)),
        "spm": (sentencepiece(), settings_of(LLAMA_NAMES, chat_template=CHATML)),
        # What tokenizer.json does counts, not what these older settings say it does.
        "says-bos": (byte_level(), settings_of(CHATML_NAMES, add_bos_token=True, add_eos_token=True)),
        "says-none": (sentencepiece(), settings_of(LLAMA_NAMES, add_bos_token=False)),
    }
    return {name: save(root / name, backend, tokenizer_config=config) for name, (backend, config) in made.items()}


@pytest.fixture(scope="module")
def pairs(folders) -> dict[str, tuple[Tokenizer, object]]:
    """Ours and Transformers' of each folder."""
    return {name: (Tokenizer.from_folder(path), AutoTokenizer.from_pretrained(path)) for name, path in folders.items()}


FOLDERS = ["chatml", "llama3", "tools", "spm", "says-bos", "says-none"]


@pytest.mark.parametrize("name", FOLDERS)
def test_encoding_and_decoding_agree_with_transformers(pairs, name):
    ours, theirs = pairs[name]

    @given(st.text(max_size=30) | st.sampled_from(["<s>a", "the <|im_end|> dog</s>", " ab  ba", "", "👍🏽 中"]))
    @settings(max_examples=60, **FIXED)
    def check(text):
        for special in (True, False):
            ids = ours.encode(text, special=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode_all(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)

    check()


@pytest.mark.parametrize("name", ["chatml", "llama3", "tools", "spm"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("extra", [{}, {"tools": TOOL}, {"enable_thinking": False}])
def test_chat_agrees_with_transformers(pairs, name, prompt, extra):
    ours, theirs = pairs[name]
    talk = TALK if name != "llama3" else TALK[:2]
    text = ours.chat(talk, add_generation_prompt=prompt, **extra)
    assert text == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt, **extra)
    ids = theirs.apply_chat_template(talk, add_generation_prompt=prompt, return_dict=False, **extra)
    assert ours.encode_chat(talk, add_generation_prompt=prompt, allow_special_tokens=True, **extra) == ids
    talk = [{**message, "content": message["content"].replace("<|im_end|>", "")} for message in talk]
    ids = theirs.apply_chat_template(talk, add_generation_prompt=prompt, return_dict=False, **extra)
    assert ours.encode_chat(talk, add_generation_prompt=prompt, **extra) == ids


def test_chat_adds_no_second_beginning_of_text(pairs):
    ours, _ = pairs["llama3"]
    ids = ours.encode_chat(TALK[:1])
    assert ids[0] == ours.bos_id
    assert ids.count(ours.bos_id) == 1


def test_text_parts_are_joined_and_missing_content_beside_tool_calls_is_empty(pairs):
    ours, _ = pairs["chatml"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours.chat([{"role": "user", "content": parts}]).startswith("<|im_start|>user\none\ntwo<|im_end|>")
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert ours.chat([called], add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "one at least"),
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["hello"], "message 0 must be an object"),
        ([{"content": "x"}], "message 0: role must be"),
        ([{"role": "user", "content": "x"}, {"role": "", "content": "x"}], "message 1: role must be"),
        ([{"role": "user"}], "content must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": 3}], "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url' cannot be read"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "cannot be read"),
        ([{"role": "user", "content": ["x"]}], "type 'str' cannot be read"),
        ([{"role": "user", "content": "x", "name": object()}], "message 0 must be JSON"),
    ],
)
def test_malformed_messages_are_refused(pairs, messages, says):
    with pytest.raises(RequestError, match=says):
        pairs["chatml"][0].chat(messages)


def test_what_a_template_raises_is_the_requests_error(pairs):
    with pytest.raises(RequestError, match="refuses these messages: Unknown role: pirate"):
        pairs["llama3"][0].chat([{"role": "pirate", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "chat template is broken"),
        ("{{ messages[0].content.no_such.thing }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ namespace(__class__=1) }}", "may not hold '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__globals__ = 1 %}", "may not hold '__globals__'"),
        ("{% include 'x' %}", "refuses these messages"),
    ],
)
def test_templates_cannot_reach_out_and_fail_alone(template, says):
    tok = Tokenizer(byte_level(), templates={"default": template})
    with pytest.raises(RequestError, match=says):
        tok.chat(TALK[:1])


def test_a_rendered_conversation_has_a_longest_size(monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_RENDERED_CHARS", 500)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'word ' }}{% endfor %}{% endfor %}"
    tok = Tokenizer(byte_level(), templates={"default": endless})
    with pytest.raises(RequestError, match="longer than 500 characters"):
        tok.chat(TALK[:1])
    fits = Tokenizer(byte_level(), templates={"default": "{{ 'x' * 500 }}"})
    assert fits.chat(TALK[:1]) == "x" * 500


def test_template_options_cannot_take_the_place_of_the_request(pairs):
    ours, _ = pairs["tools"]
    with pytest.raises(RequestError, match="'messages' is no option"):
        ours.chat(TALK, messages=[])
    with pytest.raises(RequestError, match="template options must be JSON"):
        ours.chat(TALK, thing=object())


def test_the_date_is_todays(pairs):
    assert f" {datetime.now().year} unset" in f" {pairs['tools'][0].chat(TALK)}"


def test_a_model_without_a_template_says_what_would_work(pairs):
    ours, _ = pairs["says-bos"]
    with pytest.raises(RequestError, match="no chat template; send a plain prompt"):
        ours.chat(TALK)


def test_named_templates_and_template_files(tmp_path):
    given_list = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = save(tmp_path, byte_level(), tokenizer_config={"chat_template": given_list})
    tok = Tokenizer.from_folder(folder)
    assert (tok.chat(TALK), tok.chat(TALK, tools=TOOL), tok.chat(TALK, tools=[])) == ("plain", "with tools", "plain")
    (folder / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file", encoding="utf-8")
    tok = Tokenizer.from_folder(folder)
    assert (tok.chat(TALK), tok.chat(TALK, tools=TOOL)) == ("from a file", "tools from a file")
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False) == "from a file"


def test_end_and_beginning_ids_come_from_every_file_that_names_them(tmp_path):
    def ids(stem: str, **files: object) -> tuple[frozenset[int], int | None]:
        tok = Tokenizer.from_folder(save(tmp_path / stem, byte_level(), **files))
        return tok.eos_ids, tok.bos_id

    backend = byte_level()
    s, start, end = (backend.token_to_id(t) for t in ("<s>", "<|im_start|>", "<|im_end|>"))
    assert ids("bare") == (frozenset(), None)
    assert ids("names", tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": None}) == ({end}, None)
    assert ids("map", special_tokens_map={"eos_token": "<|im_end|>", "bos_token": "<s>"}) == ({end}, s)
    assert ids("settings-first", special_tokens_map={"eos_token": "<s>"}, tokenizer_config=CHATML_NAMES)[0] == {end}
    assert ids("config", config={"eos_token_id": 7, "bos_token_id": 5, "pad_token_id": 0}) == ({7}, 5)
    assert ids("inner", config={"text_config": {"eos_token_id": [7, 8]}})[0] == {7, 8}
    generation, config = {"eos_token_id": [end, start]}, {"eos_token_id": 7, "bos_token_id": 5}
    both = ids("both", generation_config=generation, config=config, tokenizer_config={"eos_token": "<s>"})
    assert both == ({s, start, end}, 5)  # generation_config speaks before config; the name adds its own


def test_a_named_token_of_the_plain_vocabulary_is_special(tmp_path):
    folder = save(tmp_path, byte_level(), tokenizer_config=settings_of({"eos_token": "let"}))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("let x outlets")
    assert ids == theirs.encode("let x outlets")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == " x outs"
    assert ours.eos_ids == {ids[0]}


def test_truncation_and_padding_left_over_from_training_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tok = Tokenizer.from_folder(save(tmp_path, backend))
    assert tok.decode(tok.encode(LINES[0])) == LINES[0]
    assert len(tok.encode("a")) == 1


def test_ids_without_a_token(pairs):
    ours, _ = pairs["chatml"]
    size = byte_level().get_vocab_size()
    assert ours.vocab_size == size
    assert ours.id_to_token(size - 1) == "<|im_end|>"
    assert (ours.id_to_token(size), ours.id_to_token(-1)) == (None, None)
    assert ours.decode((*ours.encode("fox"), size, 9999)) == "fox"


def test_vocab_size_counts_to_the_highest_id():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    tok = Tokenizer(backend)
    assert (tok.vocab_size, tok.id_to_token(3), tok.id_to_token(7)) == (8, None, "b")


def test_token_text_keeps_the_leading_space(pairs):
    spm, bytes_ = pairs["spm"][0], pairs["chatml"][0]
    said = {t: spm.token_text(spm.tokens.index(t)) for t in ("▁a", "ab", "▁", "<0x41>", "<0xE2>", "</s>")}
    assert said == {"▁a": " a", "ab": "ab", "▁": " ", "<0x41>": "A", "<0xE2>": "\ufffd", "</s>": "</s>"}
    assert [bytes_.token_text(i) for i in bytes_.encode("the fox")] == ["the", " fox"]
    assert bytes_.token_text(bytes_.encode(" ")[0]) == " "


def test_byte_level_tokens_add_their_own_text_or_bytes_wherever_they_are(pairs):
    tokenizer, _ = pairs["chatml"]
    own, around = tokenizer.own_texts, tokenizer.encode("x", special=False)
    for token in range(tokenizer.vocab_size + 1):  # the last id has no token
        added = own[token] if isinstance(own[token], bytes) else own[token].encode()
        assert tokenizer.decode([*around, token, *around]) == (b"x" + added + b"x").decode(errors="replace")
        assert isinstance(own[token], bytes) == ("\ufffd" in tokenizer.decode([token]))
    assert [own[i] for i in tokenizer.encode("the fox 中")] == ["the", " fox", " 中"]
    assert own[tokenizer.tokens.index("<|im_end|>")] == own[tokenizer.vocab_size] == ""
    assert own[tokenizer.tokens.index("ä")] == b"\xe4"


def test_a_decoder_that_does_more_than_join_bytes_gives_tokens_no_texts_of_their_own(pairs):
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert Tokenizer(backend).own_texts is None
    assert pairs["spm"][0].own_texts is None


@pytest.mark.parametrize("bad", ["half \ud83d of it", 3, None, b"bytes"])
def test_what_is_no_text_is_a_request_error(pairs, bad):
    with pytest.raises(RequestError, match="no text that can be encoded"):
        pairs["chatml"][0].encode(bad)


def test_other_tokenizer_files_are_converted_by_transformers(tmp_path):
    backend = byte_level(specials=("<|endoftext|>",))
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt, as GPT-2 has them
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    save(tmp_path, None, vocab=vocabulary, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    tok = Tokenizer.from_folder(tmp_path)
    for text in LINES:
        assert tok.encode(text, special=False) == backend.encode(text).ids
        assert tok.decode(tok.encode(text)) == text


def test_a_folder_without_any_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(save(tmp_path, None, config={}))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer.json", "not json", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("config.json", "[1]", "config.json should hold an object, not a list"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template must be a string, or a list"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a string, or a list"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, says):
    save(tmp_path, byte_level())
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        Tokenizer.from_folder(tmp_path)


# --- two models, one vocabulary -----------------------------------------------------------------------------------


def words(tokens: dict[str, int], **kwargs) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(models.BPE(vocab=tokens, merges=[])), **kwargs)


ABC = {"a": 0, "b": 1, "c": 2, "<e>": 3}


@pytest.mark.parametrize(
    ("target", "draft", "target_rows", "draft_rows"),
    [
        (ABC, ABC, 4, 4),
        (ABC, ABC, 64, 8),  # rows padded differently, as Qwen's sizes are
        ({**ABC, "new": 4}, ABC, 8, 8),  # the draft has a row to read the target's own token
        (ABC, {**ABC, "new": 4}, 4, 8),  # the draft's own token: never chosen
        ({**ABC, "far": 6}, ABC, 4, 4),  # a token of the target that has no row there cannot come up
    ],
)
def test_same_vocabularies_pass(target, draft, target_rows, draft_rows):
    check_same_vocabulary(words(target), words(draft), target_rows, draft_rows)


@pytest.mark.parametrize(
    ("target", "draft", "rows", "says"),
    [
        (
            ABC,
            {"a": 0, "x": 1, "c": 2, "y": 3},
            (4, 4),
            "token 1 is 'b' to the target and 'x' to the draft.*same family",
        ),
        (ABC, {"a": 0, "b": 1, "<e>": 3}, (4, 4), "token 2 is 'c' to the target and None to the draft"),
        ({"a": 0, "<e>": 3}, ABC, (4, 4), "token 1 is None to the target and 'b' to the draft"),
        ({**ABC, "new": 4}, ABC, (8, 4), "ends at row 4, before the target's token 4, 'new'"),
        (ABC, ABC, (4, 3), "ends at row 3, before the target's token 3, '<e>'"),
    ],
)
def test_the_first_difference_is_named(target, draft, rows, says):
    with pytest.raises(ConfigError, match=says):
        check_same_vocabulary(words(target), words(draft), *rows)


def test_special_tokens_are_compared():
    e, c = words(ABC, eos_ids=[3]), words(ABC, eos_ids=[2])
    with pytest.raises(ConfigError, match=r"end with tokens \[3\] for the target and \[2\] for the draft"):
        check_same_vocabulary(e, c, 4, 4)
    check_same_vocabulary(words(ABC, eos_ids=[2, 3]), e, 4, 4)  # an instruction-tuned target, a base draft
    check_same_vocabulary(words(ABC), e, 4, 4)  # one that names none
    with pytest.raises(ConfigError, match="begin with token 0 for the target and 1 for the draft"):
        check_same_vocabulary(words(ABC, bos_id=0), words(ABC, bos_id=1), 4, 4)
    check_same_vocabulary(words(ABC, bos_id=0), words(ABC), 4, 4)
