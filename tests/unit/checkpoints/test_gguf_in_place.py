"""A GGUF file read in place: the same logits as from its converted folder, a few rows at a time."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import random_model, write_gguf
from torch import Tensor

from outrider.checkpoints.folder import source_bits
from outrider.checkpoints.gguf import convert_gguf, weights
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.tensors import open_tensors
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.loading.load import load
from outrider.models.config import DTYPES
from outrider.models.load import default_dtype, load_decoder, read_config
from outrider.models.tokenizer import Tokenizer
from outrider.native.library import library
from outrider.runners.native import NativeRunner

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def logits(folder: Path, **options: Any) -> Tensor:
    runner = NativeRunner(load_decoder(folder, device="cpu", **options), 64)
    runner.pool.open(0, range(9), "")
    runner.pool.reserve(0, 9)
    return runner.score([Span(0, 0, (3, 1, 4, 1, 5, 9, 2, 6, 5))]).logits


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"quantize": "int4"}, {"quantize": "int8"}], ids=str
)
@pytest.mark.parametrize("kind", [None, Q4_1, Q8_0], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma"])
def test_the_logits_are_those_of_the_converted_folder(model_type, kind, options, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")  # the CPU kernels keep the file's own blocks, see test_cpu_pass.py
    write_gguf(tmp_path / "m.gguf", random_model(model_type), kind=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert torch.equal(logits(resolve(str(tmp_path / "m.gguf")), **options), logits(tmp_path / "out", **options))


def test_a_folder_converted_to_bfloat16_gives_the_logits_of_the_file_in_bfloat16(tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model("llama"), kind=Q8_0)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", None, torch.bfloat16)
    config = read_config(tmp_path / "out")
    assert config is not None
    assert config.dtype is torch.bfloat16
    in_place = logits(resolve(str(tmp_path / "m.gguf")), dtype=torch.bfloat16)
    assert torch.equal(logits(tmp_path / "out", dtype=torch.bfloat16), in_place)


def test_no_more_than_a_few_rows_are_dequantized_at_once(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", random_model("llama"), kind=Q8_0)
    folder = resolve(str(tmp_path / "m.gguf"))
    whole = logits(folder)
    sizes: list[int] = []
    real = gguf.quants.dequantize

    def noted(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        values = real(data, kind)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 200)
    monkeypatch.setattr(gguf.quants, "dequantize", noted)
    assert torch.equal(logits(folder), whole)
    assert max(sizes) == 192  # three rows of 64, or two of 96


def test_storage_and_bits_are_those_of_most_weights(tmp_path):
    for kind, name, bits in ((None, "F32", 32), (Q4_1, "Q4_1", 4), (Q8_0, "Q8_0", 8)):
        file = tmp_path / f"{name}.gguf"
        write_gguf(file, random_model("llama"), kind=kind)
        folder = resolve(str(file))
        assert source_bits(folder) == bits
        loaded = load(str(file), device="cpu", cache_tokens=64)
        assert (loaded.stored, loaded.format) == (name, {4: "int4", 8: "int8"}.get(bits, "float32"))
        assert loaded.weight_bytes == file.stat().st_size


def test_tensors_are_named_and_shaped_as_in_a_hugging_face_checkpoint(tmp_path):
    model = random_model("llama")
    write_gguf(tmp_path / "m.gguf", model)
    with open_tensors(resolve(str(tmp_path / "m.gguf"))) as tensors:
        state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        assert tensors.names() == set(state)
        for name, value in state.items():
            assert tensors.shape(name) == value.shape
            assert torch.equal(tensors.read(name, torch.device("cpu"), torch.float32), value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stored", DTYPES)
def test_16_bits_stay_and_32_become_bfloat16_except_on_the_cpu(stored, device, tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model("llama"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", None, DTYPES[stored])
    config = read_config(tmp_path / "out")
    assert config is not None
    expected = {"cpu": "float32", "cuda": {"float32": "bfloat16"}.get(stored, stored)}[device]
    assert default_dtype(config, torch.device(device)) is DTYPES[expected]


def test_the_vocabulary_is_read_from_the_file_and_written_nowhere(tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model("llama"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    folder = resolve(str(tmp_path / "m.gguf"))
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "gguf.json", "tokenizer_config.json"}
    in_place, converted = Tokenizer.from_folder(folder), Tokenizer.from_folder(tmp_path / "out")
    assert in_place.to_json() == converted.to_json()
    assert (in_place.eos_ids, in_place.named) == (converted.eos_ids, converted.named)


def test_a_vocabulary_that_cannot_be_read_is_refused_by_load(tmp_path):
    def unknown(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"] = gguf.gguf_writer.GGUFValue("martian", gguf.GGUFValueType.STRING)

    write_gguf(tmp_path / "m.gguf", random_model("llama"), extra=unknown)
    with pytest.raises(ConfigError, match="martian"):
        load(str(tmp_path / "m.gguf"), device="cpu", cache_tokens=64)
    assert gc.isenabled()


def test_usual_files_are_loaded_without_the_gguf_package(tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model("llama"), kind=Q4_1)
    if library() is None:
        pytest.skip("the CPU kernels are not here: no compiler, or OUTRIDER_NATIVE=0")
    code = f"import sys; from outrider import load; load({str(tmp_path / 'm.gguf')!r}, device='cpu', cache_tokens=64)"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('gguf' in sys.modules)"], check=True)
