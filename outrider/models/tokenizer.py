"""From text to token ids and back, by a model folder's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outrider.checkpoints.folder import gguf_of
from outrider.checkpoints.gguf.tokenizer import build_tokenizer
from outrider.checkpoints.gguf.weights import open_gguf
from outrider.core.errors import ConfigError, RequestError
from outrider.core.prompt import RenderedChat
from outrider.models.chat_template import ChatTemplate, Message, check_messages, json_value
from outrider.models.special_tokens import Placeholders, SpecialTokens
from outrider.models.token_bytes import OwnTexts, bytes_reader


class Tokenizer:
    """One model's tokenizer: encoding, decoding, special tokens, chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
    ) -> None:
        """`named` holds special tokens by name (bos_token, eos_token, ...), `templates` chat templates by name.

        eos_ids are added to the named end-of-text token; bos_id is used where none is named.
        """
        self.named = dict(named or {})
        self._backend = backend
        self._sources = dict(templates or {})
        self._templates: dict[str, ChatTemplate] = {}
        # Settings left from training, which would silently truncate prompts.
        backend.no_truncation()
        backend.no_padding()
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        known = [t for t in self.named.values() if t not in added and backend.token_to_id(t) is not None]
        backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in known])
        eos = self._id_of("eos_token")
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
        """The tokens that end a text."""
        named_bos = self._id_of("bos_token")
        self.bos_id = bos_id if named_bos is None else named_bos
        joins_bytes = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.own_texts = OwnTexts(backend) if joins_bytes else None
        """The text of each token; None where a token's text is not just its bytes."""

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read a model folder's tokenizer. Raises ConfigError naming the file that is missing or broken."""
        settings = _read_json(path / "tokenizer_config.json")
        named = _named_tokens({**_read_json(path / "special_tokens_map.json"), **settings})
        generation, config = _read_json(path / "generation_config.json"), _read_json(path / "config.json")
        config = {**(config.get("text_config") or {}), **config}
        ids = {key: generation.get(key, config.get(key)) for key in ("eos_token_id", "bos_token_id")}
        return cls(
            _backend_of(path),
            named=named,
            templates=_templates(path, settings),
            eos_ids=_as_ids(ids["eos_token_id"]),
            bos_id=next(iter(_as_ids(ids["bos_token_id"])), None),
        )

    @cached_property
    def tokens(self) -> list[str | None]:
        """Every token as the vocabulary writes it, by id; None where an id has no token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        out: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, index in vocabulary.items():
            out[index] = token
        return out

    @cached_property
    def token_bytes(self) -> list[bytes | None]:
        """The bytes each token stands for in a text, by id; None for special tokens and ids that have no token."""
        read, special = bytes_reader(json.loads(self.to_json())), self._special_tokens.contents
        return [None if token is None or i in special else read(token) for i, token in enumerate(self.tokens)]

    @property
    def vocab_size(self) -> int:
        """The highest id plus one. A model may have more rows, for padding."""
        return len(self.tokens)

    def id_to_token(self, token: int) -> str | None:
        """A token as the vocabulary writes it; None where the id has none."""
        return self.tokens[token] if 0 <= token < len(self.tokens) else None

    def to_json(self) -> str:
        """The tokenizer as a `tokenizer.json`, for libraries that read vocabularies."""
        return self._backend.to_str()

    def encode(self, text: str, *, special: bool = True, allow_special_tokens: bool = True) -> list[int]:
        """Text to ids. Special tokens written in the text become control tokens, unless they are not allowed.

        `special` adds what the tokenizer puts around a text, such as a beginning-of-text token.
        """
        with _encodable(text):
            if allow_special_tokens or not self._special_tokens.occur_in(text):
                return self._backend.encode(text, add_special_tokens=special).ids
            return self._special_tokens.encode(text, special=special)

    def decode(self, ids: Seq[int]) -> str:
        """Ids to text, leaving out special tokens and ids that have no token."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Seq[int]) -> str:
        """Ids to text, special tokens included."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """The text of a token, with its leading space; U+FFFD where it is part of a character."""
        once = self.decode_all([token])
        return self.decode_all([token, token])[len(once) :]  # the second keeps a space the first may lose

    def chat(self, messages: Seq[Message], /, **options: Any) -> str:
        """A conversation as text; `options` are those of `render_chat`."""
        return self.render_chat(messages, allow_special_tokens=True, **options).text

    def encode_chat(self, messages: Seq[Message], /, **options: Any) -> list[int]:
        """A conversation as ids; `options` are those of `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, **options))

    def render_chat(
        self,
        messages: Seq[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
        allow_special_tokens: bool = False,
        **kwargs: Any,
    ) -> RenderedChat:
        """A conversation written by the model's chat template; `kwargs` are the template's own options.

        The template's special tokens are control tokens; those in messages, tools and `kwargs` are
        text, unless allow_special_tokens. Raises RequestError where the model has no template, a
        message is malformed, or the template raises an error.
        """
        if "messages" in kwargs:
            raise RequestError("'messages' is no option of a chat template; it is set from the request itself")
        given = json_value(kwargs, "template options")
        given |= {"messages": check_messages(messages), "tools": json_value(tools, "tools") or None}
        placeholders = Placeholders(self._special_tokens)
        if not allow_special_tokens:
            with _encodable(given):
                given = placeholders.replace(given)
        values = {"documents": None, **self.named, **given, "add_generation_prompt": add_generation_prompt}
        text = self._template("tool_use" if tools else "default").render(values)
        return RenderedChat(*placeholders.restore(text)) if placeholders.found else RenderedChat(text)

    def encode_rendered(self, chat: RenderedChat, *, special: bool = False) -> list[int]:
        """A rendered conversation as ids. Its template wrote the beginning-of-text token; `special` adds another."""
        if chat.control is None:
            return self.encode(chat.text, special=special)
        with _encodable(chat.text):
            return self._special_tokens.encode(chat.text, chat.control, special=special)

    def template_text(self, *, tools: bool = False) -> str:
        """The source of the chat template; empty where there is none."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        return self._sources.get(name, "")

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self._backend)

    def _template(self, name: str) -> ChatTemplate:
        name = name if name in self._sources else "default"
        if name not in self._sources:
            raise RequestError(
                "this model has no chat template; send a plain prompt, or take an instruction-tuned model of its family"
            )
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name])
        return self._templates[name]

    def _id_of(self, name: str) -> int | None:
        return self._backend.token_to_id(self.named[name]) if name in self.named else None


@contextmanager
def _encodable(text: object) -> Iterator[None]:
    """Raise RequestError for a value that is not text, where the tokenizers library raises TypeError."""
    try:
        yield
    except TypeError as error:
        what = type(text).__name__ if not isinstance(text, str | dict) else "half of a surrogate pair"
        raise RequestError(f"no text that can be encoded: {what}; send a string of whole characters") from error


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, target_rows: int, draft_rows: int) -> None:
    """Raise ConfigError unless both models mean the same token by each id.

    `target_rows` and `draft_rows` are the widths of their logits. Where one vocabulary is longer,
    the rest is padding: the draft needs a row for every token of the target; tokens that only the
    draft has are never chosen. Both must have the same beginning-of-text token, and share an
    end-of-text token.
    """
    fix = "a draft model must share the target's vocabulary: take a smaller model of the same family, or cross-model"
    for index, token in enumerate(target.tokens[:target_rows]):
        if index < draft.vocab_size and token != draft.tokens[index]:
            raise ConfigError(
                f"token {index} is {token!r} to the target and {draft.tokens[index]!r} to the draft; {fix}"
            )
        if index >= draft_rows and token is not None:
            raise ConfigError(
                f"the draft model ends at row {draft_rows}, before the target's token {index}, {token!r}; {fix}"
            )
    if None not in (target.bos_id, draft.bos_id) and target.bos_id != draft.bos_id:
        raise ConfigError(
            f"texts begin with token {target.bos_id} for the target and {draft.bos_id} for the draft; {fix}"
        )
    if target.eos_ids and draft.eos_ids and not target.eos_ids & draft.eos_ids:
        ends = f"{sorted(target.eos_ids)} for the target and {sorted(draft.eos_ids)} for the draft"
        raise ConfigError(f"texts end with tokens {ends}, none of them shared; {fix}")


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); download or save the model again") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file} should hold an object, not a {type(found).__name__}; download or save the model again"
        )
    return found


def _backend_of(path: Path) -> tokenizers.Tokenizer:
    """A folder's tokenizer: that of the GGUF file it refers to, of its tokenizer.json, or of older files."""
    if reference := gguf_of(path):
        weights = open_gguf(reference.checked_file())
        return build_tokenizer(weights.meta, weights.config["vocab_size"])
    file = path / "tokenizer.json"
    if not file.is_file():
        return _convert_backend(path)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ConfigError(f"{file} cannot be read ({error}); download or save the model again") from error


def _convert_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer that Transformers makes from other files (SentencePiece, vocab and merges)."""
    from transformers import AutoTokenizer

    fix = "save it once where it loads, with `tokenizer.save_pretrained(FOLDER)`, which writes tokenizer.json"
    try:
        made = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever it raises: there is no usable tokenizer
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} has no tokenizer.json, and Transformers cannot make one ({why}); {fix}") from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(f"{path} has no tokenizer.json, and {type(made).__name__} cannot be turned into one; {fix}")
    return backend


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: bos_token and so on, given as strings or as {"content": ...}."""
    spelled = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return {name: token for name, token in spelled.items() if isinstance(token, str)}


def _templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, from all places a folder may keep them; separate files take precedence."""
    given = settings.get("chat_template") or []
    try:
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        found = {str(each["name"]): str(each["template"]) for each in named}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a string, or a list of names and templates"
        ) from error
    files = [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]
    for file in files:
        if file.is_file():
            found["default" if file.parent == path else file.stem] = file.read_text(encoding="utf-8")
    return found


def _as_ids(value: Any) -> list[int]:
    """The ids in a value that is one id, a list or neither."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]
