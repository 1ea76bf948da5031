"""GGUF files that are refused, with what is wrong; nothing is left behind."""

import random
import struct

import gguf
import numpy as np
import pytest
from tiny_gguf import (
    add_tensor,
    add_vocabulary,
    finish,
    write_gguf,
)

from outrider.checkpoints.gguf import convert_gguf
from outrider.checkpoints.gguf.header import read_header
from outrider.core.errors import ConfigError, FetchError


def assert_refused(folder, complaint):
    """The file m.gguf is refused with these words, and nothing appears beside it."""
    with pytest.raises(ConfigError, match=complaint):
        convert_gguf(folder / "m.gguf", folder / "out")
    assert [file.name for file in folder.iterdir()] == ["m.gguf"]


def bare(folder, arch="llama"):
    """A writer of a file with a vocabulary and an embedding and nothing else."""
    writer = gguf.GGUFWriter(str(folder / "m.gguf"), arch)
    add_vocabulary(writer)
    add_tensor(writer, "token_embd.weight", np.zeros((400, 64), np.float32), None)
    return writer


def test_an_unknown_architecture_is_refused_with_the_list(tmp_path):
    finish(bare(tmp_path, arch="mamba"))
    assert_refused(tmp_path, "mamba.*llama, qwen2, qwen3, gemma")


def test_a_mixture_of_experts_is_refused(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=lambda writer: writer.add_expert_count(8))
    assert_refused(tmp_path, "mixture of experts")


def test_one_part_of_a_split_file_is_refused(tmp_path, tiny_model):
    write_gguf(tmp_path / "m.gguf", tiny_model, extra=lambda writer: writer.add_uint16("split.count", 3))
    assert_refused(tmp_path, "one of 3 parts.*--merge")


def test_a_tensor_of_the_wrong_shape_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0]["llama.feed_forward_length"] = gguf.gguf_writer.GGUFValue(128, gguf.GGUFValueType.UINT32)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, r"ffn_\w+.weight.*expected \(128, 64\)|ffn_down.*expected \(64, 128\)")


def test_a_tensor_no_such_model_has_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.add_tensor("blk.0.ssm_conv1d.weight", np.zeros((4, 64), np.float32))

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "ssm_conv1d")


def test_a_count_of_layers_that_is_not_there_is_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0]["llama.block_count"] = gguf.gguf_writer.GGUFValue(2_000_000_000, gguf.GGUFValueType.UINT32)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "2000000000")


def test_rotary_divisors_of_another_kind_are_refused(tmp_path, tiny_model):
    def extra(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8).astype(np.float32))

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "rope_freqs")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [("pre", "martian", "martian.*smollm"), ("model", "wordpiece", "wordpiece.*gpt2"), ("pre", "", "does not say how")],
)
def test_unknown_tokenizers_are_refused_with_what_is_read(key, value, complaint, tmp_path, tiny_model):
    def extra(writer):
        writer.kv_data[0][f"tokenizer.ggml.{key}"] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.STRING)

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, complaint)


def test_a_merge_of_what_is_no_token_is_refused(tmp_path, tiny_model):
    def extra(writer):
        value = gguf.gguf_writer.GGUFValue(["t martian"], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
        writer.kv_data[0]["tokenizer.ggml.merges"] = value

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, "not made of tokens of the vocabulary: .*martian")


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_lists_of_the_wrong_kind_are_refused(key, tmp_path, tiny_model):
    wrong, kind = (["a"], gguf.GGUFValueType.STRING) if key == "token_type" else ([7, 8], gguf.GGUFValueType.INT32)

    def extra(writer):
        value = gguf.gguf_writer.GGUFValue(wrong, gguf.GGUFValueType.ARRAY, kind)
        writer.kv_data[0][f"tokenizer.ggml.{key}"] = value

    write_gguf(tmp_path / "m.gguf", tiny_model, extra=extra)
    assert_refused(tmp_path, f"{key} should be a list of")


@pytest.fixture
def sound(tmp_path, tiny_model):
    """The bytes of a sound file, and where its tensors begin."""
    write_gguf(tmp_path / "m.gguf", tiny_model)
    data = (tmp_path / "m.gguf").read_bytes()
    return data, min(tensor.start for tensor in read_header(tmp_path / "m.gguf").tensors)


@pytest.mark.parametrize(
    ("at", "patch", "complaint"),
    [
        (0, b"GGML", "letters GGUF"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 60), "items are announced"),
        (16, struct.pack("<Q", 1 << 60), "items are announced"),
        (24, struct.pack("<Q", 1 << 63), "bytes are announced"),
    ],
)
def test_a_damaged_head_is_refused(at, patch, complaint, sound, tmp_path):
    data = bytearray(sound[0])
    data[at : at + len(patch)] = patch
    (tmp_path / "m.gguf").write_bytes(data)
    assert_refused(tmp_path, complaint)


def test_an_empty_file_is_refused_in_words(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert_refused(tmp_path, r"m\.gguf: cannot be read as a GGUF file: it is empty; download or convert it again")
    with pytest.raises(ConfigError, match=r"cannot be read as a GGUF file: No such file or directory$"):
        read_header(tmp_path / "nothing.gguf")


def test_a_file_cut_anywhere_is_refused(sound, tmp_path):
    data, tensors_at = sound
    for length in [*range(0, tensors_at, max(1, tensors_at // 60)), tensors_at + 1, len(data) - 64]:
        (tmp_path / "m.gguf").write_bytes(data[:length])
        assert_refused(tmp_path, "GGUF")


def test_a_flipped_byte_never_does_worse_than_a_refusal(sound, tmp_path):
    data, tensors_at = sound
    rng = random.Random(0)
    for trial in range(400):
        flipped = bytearray(data)
        flipped[rng.randrange(tensors_at)] ^= 1 << rng.randrange(8)
        (tmp_path / "m.gguf").write_bytes(flipped)
        try:
            convert_gguf(tmp_path / "m.gguf", tmp_path / f"out{trial}")
        except ConfigError:
            assert not (tmp_path / f"out{trial}").exists()


@pytest.mark.parametrize(
    ("error", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError("disk full"), FetchError)]
)
def test_a_conversion_that_fails_half_way_leaves_nothing(error, seen, tmp_path, tiny_model):
    class Failing:
        def start(self, label, total):
            pass

        def advance(self, amount):
            raise error

        def done(self):
            pass

    write_gguf(tmp_path / "m.gguf", tiny_model)
    with pytest.raises(seen):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", Failing())
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
