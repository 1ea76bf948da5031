"""benchmarks/replay.py: recorded texts come out as they were recorded, whoever drafts, and figures are repeatable."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_scripts import ROOT, output_of

CHECK = """
import gzip, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from replay import COMPARED, Recorded, replay_of
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
    replay, heard = replay_of(name, drafters, 4, recorded.vocab_size), {}

    def step(plain_step=replay.engine.step):
        events = plain_step()
        for event in events:
            heard.setdefault(event.seq_id, []).extend(event.tokens)
        return events

    replay.engine.step = step
    tokens, seconds, decisions = replay.serve(texts)
    assert [heard[i] for i in sorted(heard)] == [each.answer[: each.tokens] for each in texts], name
    assert tokens == sum(each.tokens for each in texts) and seconds > 0
    assert (name == "auto") == bool(decisions.rounds)
print("as recorded")
"""


JUDGED = """
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import torch
from record_texts import Judged
from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import RoundView, Traits

class Head:
    traits, rows = Traits(name="block", max_tokens=3), 1

    def propose(self, view):
        sure = SimpleNamespace(read=lambda: torch.tensor([0.9, 0.5, 0.25]))
        return [Draft((7, 8, 9), confidence=sure) for _ in view.seqs]

head, seq = Judged(Head()), Sequence(1, [1, 2], 2, SamplingParams(), 0)
head.propose(RoundView([Sequence(1, [1, 5, 5], 1, SamplingParams(), 0)], [3]))  # made up, of the same id
for token in (7, 7, 8):
    seq.tokens.append(token)
    (draft,) = head.propose(RoundView([seq], [3]))
    assert not draft, "nothing is scored"
print(head.judge(1, [7, 7, 8, 9]))
"""


def recording(folder: Path, *, drafts: bool = False) -> Path:
    """Texts of few different tokens, half of which repeat what came before. drafts: of a recorded head, too."""
    rng, cells = random.Random(3), []
    for temperature in (0.0, 1.0):
        for kind in ("chat", "code", "summary", "copy", "random"):
            texts = []
            for _ in range(8):
                prompt = [rng.randrange(40) for _ in range(20)]
                answer = [rng.randrange(40) for _ in range(15)] + (prompt[5:] * 3)[:30]
                told = [[min(rng.randrange(8), len(answer) - n), *[80] * 7] for n in range(1, len(answer) + 1)]
                texts.append((prompt, answer, told) if drafts else (prompt, answer))
            cells.append({"kind": kind, "temperature": temperature, "texts": texts})
    file = folder / "texts.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump(cells, out)
    return file


@pytest.mark.parametrize(("drafters", "recorded"), [("model", False), ("head", False), ("head", True), ("cpu", True)])
def test_every_engine_says_what_was_recorded(tmp_path: Path, drafters: str, recorded: bool):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    texts = recording(tmp_path, drafts=recorded)
    assert output_of(str(script), str(ROOT / "benchmarks"), str(texts), drafters) == "as recorded\n"


def test_a_recorded_head_is_asked_behind_every_token_and_judged_by_the_answer(tmp_path: Path):
    """It always drafts 7 8 9, which comes whole behind the first token and not at all behind the others."""
    script = tmp_path / "judged.py"
    script.write_text(JUDGED)
    told = [[0, 90, 50, 25], [0, 90, 50, 25], [0, 90, 50, 25]]
    told[0][0] = 3  # behind 7 came 7 8 9
    assert output_of(str(script), str(ROOT / "benchmarks")) == f"{told}\n"


@pytest.mark.parametrize(("drafters", "ratios"), [("model", 4), ("head", 5), ("cpu", 4)])
def test_the_table_is_the_same_again(tmp_path: Path, drafters: str, ratios: int):
    texts = recording(tmp_path, drafts=drafters == "cpu")
    options = [str(texts), "--drafters", drafters, "--batches", "4", "--texts", "8", "--cells", "chat:0", "mixed:1"]
    first, second = (output_of("replay.py", *options) for _ in range(2))
    assert first == second
    rows = [line.split() for line in first.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["chat:0", "4"], ["mixed:1", "4"]]
    assert all(float(figure) > 0 for row in rows for figure in row[2 : 3 + ratios])


def test_noise_is_left_out_of_the_figures(tmp_path: Path):
    """Where nothing is decided, they are those of a quiet machine."""
    texts = recording(tmp_path, drafts=True)
    options = [str(texts), "--drafters", "cpu", "--batches", "1", "--texts", "8", "--cells", "chat:0"]
    quiet, busy = (output_of("replay.py", *options, "--noise", n).splitlines()[1].split() for n in ("0", "0.6"))
    assert quiet[2:5] == busy[2:5]  # plain, lookups, head


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--noise", "0.2"], "only with --drafters cpu"),
        (["--drafters", "cpu", "--noise", "9"], "between 0 and 2"),
        (["--drafters", "cpu", "--batches", "0"], "between 1 and 64"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: list[str], said: str):
    command = [sys.executable, str(ROOT / "benchmarks/replay.py"), str(tmp_path / "none.json.gz"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
