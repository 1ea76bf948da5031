"""A whole run on a tiny model: figures against the engine's own statistics, resuming, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "conformance"))
from bench_world import FACTS, PROMPTS, lines_of, offline_bench, pair_folders, quiet  # noqa: F401 - a fixture
from tiny_block import block_config, random_block, save_block

from outrider.bench.answers import Answer, answer_all, digest_of
from outrider.bench.conversations import Conversations, Item
from outrider.bench.energy import energy_meter
from outrider.bench.engines import PLAIN, Engines, controlled_rows, load_target, with_lengths
from outrider.bench.offline import Axes
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import RunFile, make_header, open_run, read_run
from outrider.bench.summary import ALL, summarize
from outrider.bench.tables import COLUMNS, cells_of
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.models.load import load_decoder
from outrider.testing.toy import ByteTokenizer

AXES = Axes(max_tokens=23, repeats=2, temperatures=(0.0, 0.8), batches=(1, 2))


@pytest.fixture(scope="module")
def finished(pair_folders, tmp_path_factory):  # noqa: F811 - the fixture
    bench = offline_bench(pair_folders, AXES, tmp_path_factory.mktemp("run") / "run.jsonl")
    bench.measure_all(quiet)
    yield bench
    bench.engines.close()


def test_texts_are_plain_decoding_s_and_drafts_that_agree_are_accepted(finished):
    found = summarize(finished.run)
    rows = {(row.cell["category"], row.cell["temperature"], row.cell["batch"], row.row): row for row in found}
    assert len(rows) == 3 * 2 * 2 * 3
    for (_, temperature, _, name), row in rows.items():
        assert (row.identical, row.repetitions) == (row.texts, 2)
        assert (row.speedup is None) == (name == PLAIN)
        assert (
            row.tau_range[0] == row.tau_range[1] == pytest.approx(row.tokens_per_round.value)
        )  # a function of the text
        if name.startswith("draft-model") and temperature == 0:
            assert row.alpha == row.per_position_conditional_rates[0] == 1
            assert row.per_position_acceptance_rates[0] == 1
            assert 4 < row.acceptance_length.value <= 5
        if name == PLAIN:
            assert (row.alpha, row.acceptance_length, row.tokens_per_round.value) == (None, None, 1)
    assert rows["two", 0.0, 1, PLAIN].texts == 3  # three turns
    assert rows[ALL, 0.0, 1, PLAIN].texts == 5


def test_how_long_it_takes_by_hand(pair_folders):  # noqa: F811 - the fixture
    bench = offline_bench(pair_folders, replace(AXES, temperatures=(0.0,), batches=(1,)))
    try:
        assert bench.expected_seconds() > 0
        (reference,) = bench.run.lines  # of category one, which has two texts; the other has three turns
        # each text takes 5 s, a warm-up 16 of the 23 tokens; 2 repetitions of 3 rows, and the other reference
        reference["seconds"] = 10.0
        assert bench.expected_seconds() == pytest.approx(5.0 * (6 * (2 + 16 / 23) + 6 * (3 + 16 / 23) + 3))
        bench.measure_all(quiet)
        assert bench.expected_seconds() == 0
        for line in bench.run.lines:
            line["seconds"] = 2.0
        del bench.run.lines[-1]
        # known: two references and five measurements of three texts, six of two
        assert bench.expected_seconds() == pytest.approx((3 + 16 / 23) * 2.0 * 13 / (2 + 3 + 6 * 2 + 5 * 3))
    finally:
        bench.engines.close()


def test_a_reference_is_what_an_engine_of_its_own_writes(finished, pair_folders):  # noqa: F811 - the fixture
    with LLM(str(pair_folders[0]), drafter="none", device="cpu", threads=1) as llm:
        params = SamplingParams(max_tokens=23, temperature=0.8, seed=1)
        result = llm.generate(PROMPTS[1].turns[0], params)
    reference = finished.run.find("reference", cell=cell_of("one", 0.8, 1))
    assert tuple(reference["answers"][1]) == (result.text, digest_of(result.tokens))


def cell_of(category: str, temperature: float, batch: int) -> dict:
    return {"category": category, "temperature": temperature, "batch": batch, "context": 0, "thinking": ""}


def test_what_events_count_is_what_the_engine_s_statistics_say(finished):
    engine = finished.engines.use("suffix")
    prompt = tuple([5, 6, 7, 8] * 9)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (answer,) = answer_all(engine, [prompt], [params], batch=1, salt="x").answers
    tally = answer.stats.all
    assert (answer.rounds, answer.drafted, answer.accepted) == (tally.rounds, tally.drafted, tally.accepted)
    assert sum(answer.rejected_at) == tally.rejected
    assert answer.accepted_at[: len(tally.accepted_at)] == tally.accepted_at[: len(answer.accepted_at)]
    assert answer.drafts == tally.drafted_at[0] > 0
    assert sum(answer.accepted_at) == answer.accepted


def test_energy_and_first_tokens_are_told(finished):
    (line, _) = [each for each in lines_of(finished.run, PLAIN, "one") if each["cell"] == cell_of("one", 0.0, 1)]
    assert line["joules"] == 5.0
    (row,) = [r for r in summarize(finished.run) if r.cell == cell_of("one", 0.0, 1) and r.row == PLAIN]
    assert row.joules_per_token == pytest.approx(10 / (2 * line["tokens"]))
    assert len(line["first_token_seconds"]) == 2
    assert 0 < row.time_to_first_token < line["seconds"]
    assert line["decode_tokens"] == line["tokens"] - 2  # but the first of each


def test_an_interrupted_run_continues_and_measures_nothing_twice(pair_folders, tmp_path):  # noqa: F811 - the fixture
    axes, out = Axes(max_tokens=8, repeats=2), tmp_path / "run.jsonl"
    bench = offline_bench(pair_folders, axes, out)

    def interrupt(what: str, done: int, total: int) -> None:
        assert total == 2 * 2 * 3
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.measure_all(interrupt)
    kept = out.read_text()
    assert len(read_run(out).of("measure")) == 5
    assert summarize(read_run(out))  # of what there is
    out.write_text(kept + '{"part": "mea')  # killed while it wrote
    bench.engines.close()
    again = offline_bench(pair_folders, axes, out)
    again.measure_all(quiet)
    again.engines.close()
    assert out.read_text().startswith(kept)
    places = [(str(line["cell"]), line["row"], line["repetition"]) for line in read_run(out).of("measure")]
    assert len(places) == len(set(places)) == 12


def test_a_file_of_another_run_is_not_continued(tmp_path):
    open_run(make_header("offline", {"model": "a", "repeats": 3}, FACTS), tmp_path / "run.jsonl")
    with pytest.raises(ConfigError, match="its repeats is 3, not 4; name another file"):
        open_run(make_header("offline", {"model": "a", "repeats": 4}, FACTS), tmp_path / "run.jsonl")
    (tmp_path / "other.jsonl").write_text(json.dumps({"format": "x"}) + "\n")
    with pytest.raises(ConfigError, match="no file of `outrider bench --out`"):
        read_run(tmp_path / "other.jsonl")


def test_repetitions_begin_with_the_next_row(finished):
    cell = cell_of("one", 0.0, 1)
    lines = [line for line in finished.run.of("measure") if line["cell"] == cell]
    first, second = ([line["row"] for line in lines if line["repetition"] == r] for r in (0, 1))
    assert second == [*first[1:], first[0]]
    assert first[0] == PLAIN


class Chat(ByteTokenizer):
    """Writes messages as lines; thinking is a line of its own."""

    def __init__(self, template: str) -> None:
        self.template = template

    def template_text(self) -> str:
        return self.template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages, enable_thinking: bool = True) -> list[int]:
        lines = [f"{m['role']}: {m['content']}" for m in messages] + ([] if enable_thinking else ["<think></think>"])
        return self.encode("\n".join(lines))


def test_turns_are_written_with_plain_answers_thinking_and_filling():
    prompt = BenchPrompt("p", "c", ("one", "two"), ({"role": "system", "content": "S"},))
    chat = Conversations(Chat("{{ enable_thinking }}"))  # type: ignore[arg-type]
    before = [Item("p", 0, (1,), "ONE"), Item("q", 0, (1,), "no")]
    written = bytes(chat.item(prompt, 1, before, 0, "").tokens).decode()
    assert written == "system: S\nuser: one\nassistant: ONE\nuser: two"
    assert bytes(chat.item(prompt, 0, [], 0, "off").tokens).decode() == "system: S\nuser: one\n<think></think>"
    filled = bytes(chat.item(prompt, 0, [], 300, "on").tokens).decode()
    assert filled.startswith("system: S\nuser: The old bridge over")
    assert filled.endswith("\n\none")
    assert 285 < len(filled) <= 300
    assert len(chat.item(prompt, 0, [], 5, "").tokens) == len("system: S\nuser: one")  # longer already
    with pytest.raises(ConfigError, match="has no enable_thinking"):
        Conversations(Chat("{{ messages }}")).check_thinking("on")  # type: ignore[arg-type]
    plain = Conversations(Chat(""))  # type: ignore[arg-type]
    assert bytes(plain.item(prompt, 0, [], 0, "").tokens).decode() == "S\n\none"


def test_a_drafter_that_reads_layers_has_a_target_of_its_own(pair_folders, tmp_path):  # noqa: F811 - the fixture
    decoder = load_decoder(pair_folders[0], device="cpu")
    head = save_block(tmp_path / "head", random_block(block_config(decoder.config, draft_vocab_size=100), decoder))
    drafters, made = [f"block:model={head}", "suffix"], []

    def make():
        made.append(load_target(str(pair_folders[0]), drafters, max_batch=1, device="cpu", threads=1))
        return made[-1]

    engines = Engines(make, drafters, max_batch=1)
    assert [engines.use(row).target for row in (*drafters, PLAIN)] == [made[0].target, made[1].target, made[1].target]
    params = [SamplingParams(max_tokens=12)]
    texts = {
        row: answer_all(engines.use(row), [[5, 6, 7]], params, batch=1, salt=row).answers[0] for row in engines.rows
    }
    assert len({text.digest for text in texts.values()}) == 1
    assert texts[drafters[0]].drafted > 0
    engines.close()


def test_repetitions_that_differ_are_told_beside_tau(finished):
    """As under the controller: one of two repetitions has twice the rounds."""
    lines = [dict(line) for line in lines_of(finished.run, "suffix", "one")]
    slow = next(line for line in lines if line["repetition"] == 1 and line["cell"] == cell_of("one", 0.0, 1))
    slow["rounds"] = [2 * count for count in slow["rounds"]]
    row = next(each for each in summarize(RunFile({}, None, lines)) if each.cell == slow["cell"])
    fast = row.tau_range[1]
    assert row.tau_range[0] == pytest.approx(fast / 2)
    assert cells_of(row)[COLUMNS.index("τ")] == f"{fast / 1.5:.2f} [{fast / 2:.2f}, {fast:.2f}]"


def test_the_controller_decides_in_rows_of_auto_or_in_all():
    drafters = ["suffix:k=3", "auto:model=x", "suffix+prediction"]
    assert controlled_rows(drafters, every=False) == ["auto:model=x"]
    assert controlled_rows(drafters, every=True) == drafters


def test_lengths_are_given_to_every_drafter():
    assert with_lengths(["suffix", "eagle:model=x", "mtp:k=2"], [3, 5]) == [
        *("suffix:k=3", "suffix:k=5", "eagle:model=x,k=3", "eagle:model=x,k=5", "mtp:k=2")
    ]
    assert with_lengths(["a+b"], []) == ["a+b"]
    with pytest.raises(ConfigError, match="is a mix"):
        with_lengths(["a+b"], [3])


def test_rapl_counters_are_added_and_may_begin_anew(tmp_path):
    for package, joules in ((0, 7), (1, 5)):
        folder = tmp_path / f"intel-rapl:{package}"
        folder.mkdir()
        (folder / "energy_uj").write_text(f"{joules}000000\n")
        (folder / "max_energy_range_uj").write_text("262143000000\n")
    part = tmp_path / "intel-rapl:0:0"
    part.mkdir()
    (part / "energy_uj").write_text("99000000\n")
    meter = energy_meter(torch.device("cpu"), tmp_path)
    assert (meter.source, meter.read()) == ("RAPL, all packages", 12.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1000000\n")
    assert meter.since(12.0) == pytest.approx(262_143 - 6)
    assert energy_meter(torch.device("cpu"), tmp_path / "none").since(0.0) is None


def test_nvml_s_counter_is_in_millijoules(monkeypatch):
    class Library:
        named = b""

        def nvmlInit_v2(self):  # noqa: N802 - NVML's name
            return 0

        def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802 - the same
            Library.named = uuid
            return 0

        def nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):  # noqa: N802 - the same
            energy._obj.value = 12_500
            return 0

    monkeypatch.setattr("outrider.bench.energy.ctypes.CDLL", lambda name: Library())
    properties = type("Properties", (), {"uuid": "0a1b"})
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    meter = energy_meter(torch.device("cuda"))
    assert (meter.source, meter.read(), meter.since(2.5)) == ("NVML, the whole GPU", 12.5, 10.0)
    assert Library.named == b"GPU-0a1b"
    monkeypatch.setattr(Library, "nvmlDeviceGetTotalEnergyConsumption", lambda *_: 3)  # not supported
    assert energy_meter(torch.device("cuda")).since(0.0) is None


def test_a_text_that_fails_says_so():
    from outrider.engine.events import Event

    with pytest.raises(ConfigError, match="a text failed: NaN"):
        Answer().count(Event(1, error="NaN"))
