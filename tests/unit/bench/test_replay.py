"""benchmarks/replay.py: recorded texts come out as they were recorded, whoever drafts, and figures are repeatable."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from benchmark_scripts import ROOT, output_of

CHECK = """
import gzip, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from replay import COMPARED, Recorded, Replay
from replayed_target import find, reference_find
from outrider.kernels import lookup

def compared(*args):
    found = find(*args)
    assert torch.equal(found, reference_find(*args))
    return found

lookup.find = compared
drafters = sys.argv[3]
with gzip.open(sys.argv[2], "rt") as file:
    recorded = Recorded(json.load(file), COMPARED[drafters].rates)
texts = recorded.take("mixed:0", 12)
for name in COMPARED[drafters].engines:
    replay, heard = Replay(name, drafters, 4, recorded.vocab_size), {}

    def step(plain_step=replay.engine.step):
        events = plain_step()
        for event in events:
            heard.setdefault(event.seq_id, []).extend(event.tokens)
        return events

    replay.engine.step = step
    speed, spent = replay.serve(texts)
    assert [heard[i] for i in sorted(heard)] == [each.answer[: each.tokens] for each in texts], name
    assert speed > 0 and (name == "auto") == bool(spent)
print("as recorded")
"""


def recording(folder: Path) -> Path:
    """Texts of few different tokens, half of which repeat what came before."""
    rng, cells = random.Random(3), []
    for temperature in (0.0, 1.0):
        for kind in ("chat", "code", "summary", "copy", "random"):
            texts = []
            for _ in range(8):
                prompt = [rng.randrange(40) for _ in range(20)]
                answer = [rng.randrange(40) for _ in range(15)] + (prompt[5:] * 3)[:30]
                texts.append((prompt, answer))
            cells.append({"kind": kind, "temperature": temperature, "texts": texts})
    file = folder / "texts.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump(cells, out)
    return file


@pytest.mark.parametrize("drafters", ["model", "head"])
def test_every_engine_says_what_was_recorded(tmp_path: Path, drafters: str):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    assert output_of(str(script), str(ROOT / "benchmarks"), str(recording(tmp_path)), drafters) == "as recorded\n"


@pytest.mark.parametrize(("drafters", "ratios"), [("model", 4), ("head", 5)])
def test_the_table_is_the_same_again(tmp_path: Path, drafters: str, ratios: int):
    options = ["run", str(recording(tmp_path)), "--drafters", drafters, "--batches", "4", "--texts", "8"]
    options += ["--cells", "chat:0", "mixed:1"]
    first, second = (output_of("replay.py", *options) for _ in range(2))
    assert first == second
    rows = [line.split() for line in first.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["chat:0", "4"], ["mixed:1", "4"]]
    assert all(float(figure) > 0 for row in rows for figure in row[2 : 3 + ratios])
