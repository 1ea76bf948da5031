"""Tokenizers out of GGUF files: same tokens as llama.cpp's definition."""

import random
from itertools import pairwise

import gguf
import pytest
import regex
from tiny_gguf import (
    TEXT,
    byte_level_vocabulary,
    random_model,
    write_gguf,
)
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from outrider.checkpoints.gguf import convert_gguf

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# llama.cpp's patterns, as its vocabulary code lists them for each name
LLAMA_CPP = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
SAMPLES = [
    *TEXT,
    "12345 and 3.14159, x2 y33 z444",
    "  spaces   before\n\n\tand  after  ",
    "don't we'LL they've I'M",
    "naïve café 東京 🎉 ½ ٣٤ Ⅷ",
    "for i in range(10):\r\n    print(i ** 2)  # ok!!\n",
    "a\u00a0b <=> $9.99 ^~| ...",
]


def byte_spelling() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest follow from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def cut(text: str, patterns: list[str]) -> list[str]:
    """Cut by each pattern in turn; what a pattern does not match stays as a piece of its own."""
    pieces = [text]
    for pattern in patterns:
        out = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                out += [piece[at : match.start()], match.group()]
                at = match.end()
            out.append(piece[at:])
        pieces = [piece for piece in out if piece]
    return pieces


def bpe_by_hand(text: str, pre: str) -> list[int]:
    tokens, merges = byte_level_vocabulary()
    ids, ranks = {token: i for i, token in enumerate(tokens)}, {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    out, spelling = [], byte_spelling()
    for piece in cut(text, LLAMA_CPP[pre]):
        symbols = [spelling[b] for b in piece.encode()]
        if pre == "llama-bpe" and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        out += [ids[symbol] for symbol in symbols]
    return out


def with_pre(pre):
    def extra(writer):
        writer.kv_data[0]["tokenizer.ggml.pre"] = gguf.gguf_writer.GGUFValue(pre, gguf.GGUFValueType.STRING)

    return extra


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_byte_level_tokens_are_those_of_llama_cpps_definition(pre, tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=with_pre(pre))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert ids == bpe_by_hand(text, pre), text
        assert tokenizer.decode(ids) == text


def test_smollm_cuts_as_hugging_faces_own_tokenizer_does(tmp_path, tiny):
    convert_gguf(tiny[0], tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in SAMPLES:
        assert ours.encode(text).ids == theirs.encode(text).ids, text


def test_qwen2_composes_accents_first(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=with_pre("qwen2"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("cafe\u0301").ids == tokenizer.encode("caf\u00e9").ids


def test_special_tokens_are_whole_and_the_chat_template_renders(tmp_path, tiny):
    convert_gguf(tiny[0], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<|im_start|>") == [1]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert text == "<|im_start|>the cat<|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    raw = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [raw.encode(sample).ids for sample in SAMPLES] == [tokenizer.encode(sample) for sample in SAMPLES]


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_beginning_and_end_tokens_follow_the_files_flags(bos, eos, tmp_path, tiny_model):
    def extra(writer):
        flags = {"add_bos_token": bos, "add_eos_token": eos}
        for name, flag in flags.items():
            writer.kv_data[0][f"tokenizer.ggml.{name}"] = gguf.gguf_writer.GGUFValue(flag, gguf.GGUFValueType.BOOL)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ids = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("the cat").ids
    assert ids == [1] * bos + bpe_by_hand("the cat", "smollm") + [2] * eos


SPACE = "\u2581"


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Unknown, ends, 256 bytes, pieces of the samples, then single letters; scores fall with the id, as in Llama 2."""
    rng = random.Random(3)
    words = [SPACE + word for text in TEXT for word in text.split()]
    pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, min(len(word), i + 5) + 1)}
    pieces |= {SPACE * 2, SPACE * 3}
    chosen = rng.sample(sorted(pieces), 90)
    letters = sorted({letter for word in words for letter in word} | {SPACE})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *chosen, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(chosen))] + [-1e4 - i for i in range(len(letters))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(chosen) + len(letters))


def sentencepiece_by_hand(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """As llama.cpp does: join the neighbours with the best score, leftmost first; spell out the rest in bytes."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list((" " + text).replace(" ", SPACE))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


def test_sentencepiece_tokens_are_those_of_llama_cpps_definition(tmp_path):
    tokens, scores, kinds = sentencepiece_vocabulary()
    model = random_model("llama", vocab_size=len(tokens))

    def extra(writer):
        for key in ("merges", "pre", "add_bos_token", "token_type", "tokens", "model"):
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)

    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert ids == [1, *sentencepiece_by_hand(text, tokens, scores)], text
        assert tokenizer.decode(ids) == text
