"""What the kept times of a model's passes depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.loading.load import LoadedModel
from outrider.loading.machine import speed_facts
from outrider.models.tokenizer import Tokenizer
from outrider.testing.toy import ToyRunner


def test_times_are_of_a_model_a_format_and_a_number_of_threads(tmp_path: Path):
    tokenizer = Tokenizer.__new__(Tokenizer)  # nobody asks it anything
    loaded = LoadedModel("toy", tmp_path, ToyRunner(), tokenizer, "float32", threads="2 of 4 (measured: 51 passes/s)")
    facts = speed_facts(loaded)
    assert speed_facts(replace(loaded, threads="2 of 4 (measured: 48 passes/s)")) == facts
    for other in (
        {"threads": "1 of 4 (measured: 51 passes/s)"},
        {"threads": "4"},
        {"format": "int4"},
        {"pinned": True},
    ):
        assert speed_facts(replace(loaded, **other)) != facts
