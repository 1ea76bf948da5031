"""Two vocabularies: byte-level BPE and SentencePiece pieces of the same bytes are the same token."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from outrider.models.tokenizer import Tokenizer
from outrider.models.vocab_map import VocabMap

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(words: list[str], specials: list[str], eos: str) -> Tokenizer:
    """Byte-level BPE without merges but those that make `words`, which have two pieces each."""
    vocab = {char: i for i, char in enumerate(ALPHABET)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return Tokenizer(backend, named={"eos_token": eos})


def sentencepiece(pieces: list[str], bos: str, eos: str) -> Tokenizer:
    vocab = [(bos, 0.0), (eos, 0.0), ("<unk>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    vocab += [(piece, -1.0 - i / 100) for i, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(vocab, unk_id=2, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (bos, eos)])
    return Tokenizer(backend, named={"bos_token": bos, "eos_token": eos})


@pytest.fixture(scope="module")
def qwenish() -> Tokenizer:
    return byte_level(["Ġthe", "Ġcat", "hello"], ["<|im_start|>", "<|end|>"], "<|end|>")


@pytest.fixture(scope="module")
def smollish() -> Tokenizer:
    return byte_level(["Ġthe", "Ġdog"], ["<|end_of_text|>", "<|im_start|>"], "<|end_of_text|>")


@pytest.fixture(scope="module")
def llamaish() -> Tokenizer:
    return sentencepiece(["▁the", "▁dog", "h", "e", "l", "o", "▁", "c", "a", "t"], "<s>", "</s>")


def test_tokens_of_the_same_bytes_are_shared(qwenish: Tokenizer, smollish: Tokenizer):
    vocab = VocabMap(qwenish, smollish, qwenish.vocab_size, smollish.vocab_size)
    names = {qwenish.tokens[t]: smollish.tokens[d] for t, d in vocab.shared.items()}
    assert all(names[char] == char for char in ALPHABET)
    assert names["Ġthe"] == "Ġthe"
    assert names["<|im_start|>"] == "<|im_start|>"
    assert names["<|end|>"] == "<|end_of_text|>"  # both end a text
    assert "Ġcat" not in names
    assert "Ġdog" not in names.values()
    assert vocab.beginning == ()
    assert vocab.coverage == len(names) / qwenish.vocab_size


@pytest.mark.parametrize("text", [" the cat says hello", "hello hello", " dog", "é the ☃ cat", "\n\t the"])
def test_a_translated_text_is_the_same_text(qwenish: Tokenizer, smollish: Tokenizer, llamaish: Tokenizer, text: str):
    ids = qwenish.encode(text)
    for draft in (smollish, llamaish):
        translated = VocabMap(qwenish, draft, qwenish.vocab_size, draft.vocab_size).translate(ids)
        assert draft.decode_all(translated) == text


def test_a_sentencepiece_vocabulary_and_its_beginning(qwenish: Tokenizer, llamaish: Tokenizer):
    vocab = VocabMap(qwenish, llamaish, qwenish.vocab_size, llamaish.vocab_size)
    names = {qwenish.tokens[t]: llamaish.tokens[d] for t, d in vocab.shared.items()}
    assert names["Ġthe"] == "▁the"
    assert names["h"] == "h"
    assert names["Ċ"] == "<0x0A>"
    assert names["<|end|>"] == "</s>"
    assert vocab.beginning == (llamaish.bos_id,)
    back = VocabMap(llamaish, qwenish, llamaish.vocab_size, qwenish.vocab_size)
    assert back.beginning == ()


def test_rows_that_a_model_lacks_are_not_shared(qwenish: Tokenizer, smollish: Tokenizer):
    vocab = VocabMap(qwenish, smollish, 100, 50)
    assert vocab.shared
    assert all(t < 100 and d < 50 for t, d in vocab.shared.items())
