"""From a GGUF file's vocabulary to a tokenizer, and the settings of its tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.checkpoints.gguf.metadata import Metadata

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_1 = DIGITS_3.replace("{1,3}", "")

# tokenizer.ggml.pre -> the patterns that split text before merging, one after the other, as in llama.cpp
SPLITS: Mapping[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", GPT2),
    "gpt-2": (GPT2,),
    "qwen2": (DIGITS_1,),
    "deepseek-r1-qwen": (DIGITS_1,),
    "llama-bpe": (DIGITS_3,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
NFC_NORMALIZED = {"qwen2", "deepseek-r1-qwen"}  # their tokenizer applies Unicode NFC first
IGNORES_MERGES = {"llama-bpe"}  # a piece that is a token is not split by merges
ADDS_BOS = {"llama-bpe"}

# Tokens that end a turn, where the file marks them as control tokens. llama.cpp stops at these too.
END_OF_TURN_TOKENS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}


def build_tokenizer(meta: Metadata, rows: int) -> Tokenizer:
    """The file's tokenizer. rows: of the embedding. Raises ConfigError where it is of a kind that is not supported."""
    if len(_vocab_tokens(meta)) > rows:
        raise meta.fail(f"{len(_vocab_tokens(meta))} tokens have only {rows} rows in the embedding")
    kind = meta.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta)
    else:
        raise meta.fail(
            f"tokenizer {kind!r} is not read from GGUF; what is: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        )
    _add_tokens(tokenizer, meta)
    _add_post_processor(tokenizer, meta)
    return tokenizer


def end_ids(meta: Metadata) -> list[int]:
    """The tokens that end a text: the file's own first, then control tokens that are known to end a turn."""
    tokens, kinds = _vocab_tokens(meta), _token_types(meta)
    named = [meta.token(name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends = [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL and token in END_OF_TURN_TOKENS
    ]
    return list(dict.fromkeys([i for i in named if i is not None] + ends))


def _vocab_tokens(meta: Metadata) -> list[str]:
    tokens = meta.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise meta.fail("the vocabulary is empty")
    return tokens


def _token_types(meta: Metadata) -> list[float]:
    """The type of each token; a file without types has ordinary tokens only."""
    size = len(_vocab_tokens(meta))
    if "tokenizer.ggml.token_type" not in meta.values:
        return [1.0] * size
    kinds = meta.numbers("tokenizer.ggml.token_type")
    if len(kinds) != size:
        raise meta.fail(f"tokenizer.ggml.token_type has {len(kinds)} entries for {size} tokens")
    return kinds


def _byte_level(meta: Metadata) -> Tokenizer:
    pre = meta.text("tokenizer.ggml.pre", "")
    if pre not in SPLITS:
        what = f"pre-tokenizer {pre!r}" if pre else "a file that does not say how to split text (tokenizer.ggml.pre)"
        raise meta.fail(f"{what} is not read from GGUF; what is: {', '.join(SPLITS)}")
    vocab = _ids_by_token(_vocab_tokens(meta))
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in meta.texts("tokenizer.ggml.merges"))]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORES_MERGES)
    except Exception as error:  # the Rust side raises nothing narrower
        raise meta.fail(f"a merge is not made of tokens of the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in NFC_NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: Metadata) -> Tokenizer:
    """SentencePiece BPE: merges are not stored, but follow from the tokens and their scores."""
    tokens = _vocab_tokens(meta)
    if meta.text("general.architecture").startswith("gemma"):
        # Runs of spaces are stored as spaces here; and Gemma's scores are not its merge order, its ids are.
        tokens = [SPACE * len(token) if set(token) == {" "} else token for token in tokens]
        scores = [-float(i) for i in range(len(tokens))]
    else:
        scores = meta.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise meta.fail(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = _ids_by_token(tokens)
    unknown = meta.token("unknown", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = meta.flag("tokenizer.ggml.add_space_prefix", default=True)
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if spaced else spell
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return tokenizer


def merges_of(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a third, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _ids_by_token(tokens: list[str]) -> dict[str, int]:
    """Each token's id; of two equal tokens, the first."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _add_tokens(tokenizer: Tokenizer, meta: Metadata) -> None:
    """Add control and user-defined tokens, which are matched in the text before it is split."""
    tokens = _vocab_tokens(meta)
    marked = [(tokens[i], kind) for i, kind in enumerate(_token_types(meta)) if kind in (CONTROL, USER_DEFINED)]
    # A token not in the vocabulary was rewritten above, and is reached by merges.
    marked = [(token, kind) for token, kind in marked if tokenizer.token_to_id(token) is not None]
    control = [AddedToken(token, special=True, normalized=False) for token, kind in marked if kind == CONTROL]
    defined = [AddedToken(token, special=False, normalized=False) for token, kind in marked if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _adds_bos_eos(meta: Metadata) -> tuple[bool, bool]:
    """Whether encoding adds a beginning-of-text and an end-of-text token."""
    spm = meta.text("tokenizer.ggml.model") == "llama"
    usual = spm or meta.text("tokenizer.ggml.pre", "") in ADDS_BOS
    return meta.flag("tokenizer.ggml.add_bos_token", usual), meta.flag("tokenizer.ggml.add_eos_token", default=False)


def _add_post_processor(tokenizer: Tokenizer, meta: Metadata) -> None:
    tokens = _vocab_tokens(meta)
    first, last = (
        (meta.token(name, len(tokens)) if wanted else None)
        for name, wanted in zip(("bos", "eos"), _adds_bos_eos(meta), strict=True)
    )
    around = [(tokens[i], i) for i in (first, last) if i is not None]
    if not around:
        return
    if any(set(token) & {"$", ":"} for token, _ in around):  # these have a meaning in a template
        raise meta.fail(f"{around} cannot be the tokens a text begins and ends with")
    before = [] if first is None else [tokens[first]]
    after = [] if last is None else [tokens[last]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=around,
    )


def tokenizer_config(meta: Metadata, context: int) -> dict[str, Any]:
    """The settings of tokenizer_config.json. context: max tokens of a text."""
    tokens = _vocab_tokens(meta)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.token(key, len(tokens))
        settings[f"{name}_token"] = None if token is None else tokens[token]
    settings["add_bos_token"], settings["add_eos_token"] = _adds_bos_eos(meta)
    if "tokenizer.chat_template" in meta.values:
        settings["chat_template"] = meta.text("tokenizer.chat_template")
    return settings
