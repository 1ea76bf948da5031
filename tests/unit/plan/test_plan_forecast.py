"""What the plan says: of headers on the hub and in GGUF files, of memory that is short, on the screen and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from held_tensors import held_bytes

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))

from tiny_gguf import random_model, write_gguf
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.plan import parse_size
from outrider.core.errors import ConfigError, FetchError
from outrider.llm import LLM
from outrider.native.library import library
from outrider.plan.estimate import DRIVER, GRAPH, LIBRARIES
from outrider.plan.facts import read_facts
from outrider.plan.forecast import PlanOptions, make_forecast
from outrider.plan.page import summary
from outrider.testing.synthetic import SHAPES, synthetic_pair

MEMORY = 4 << 30
GIB = 1 << 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and a draft."""
    return tuple(map(str, synthetic_pair("tiny").save(tmp_path_factory.mktemp("pair"))))


@pytest.fixture
def hub(pair, monkeypatch):
    """A hub that knows one repository, `org/model`, and hands out headers alone."""
    import huggingface_hub
    from safetensors import safe_open

    def headers(self, repo, *, revision):
        if repo != "org/model":
            raise ConnectionError("no network")
        with safe_open(f"{pair[0]}/model.safetensors", "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
            tensors = {n: SimpleNamespace(shape=p.get_shape(), dtype=p.get_dtype()) for n, p in parts.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", headers)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, revision: f"{pair[0]}/{name}")


def test_a_hub_id_is_planned_from_its_headers(hub, pair):
    remote, local = read_facts("org/model"), read_facts(pair[0])
    assert remote.folder is None
    assert remote.tensors == local.tensors
    options = PlanOptions(memory=MEMORY, device="cpu")
    plans = [make_forecast(name, "suffix", options) for name in ("org/model", pair[0])]
    assert plans[0].at_start == plans[1].at_start > 0


def test_a_hub_that_cannot_be_reached_is_a_clear_error(hub):
    with pytest.raises(FetchError, match=r"headers of org/other could not be read .*HF_HUB_OFFLINE"):
        read_facts("org/other")


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_0", "F16"])
def test_a_gguf_file_is_planned_from_its_header(kind, native, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_NATIVE", native)
    library()  # found before its home is another
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    write_gguf(file, random_model("llama"), kind=gguf.GGMLQuantizationType[kind])
    plan = make_forecast(str(file), "none", PlanOptions(memory=MEMORY, device="cpu", max_batch=2))
    llm = LLM(str(file), drafter="none", device="cpu", max_batch=2, threads=1)
    assert held_bytes(llm) == pytest.approx(plan.at_start - plan.own, rel=0.05)


def test_a_cuda_device_that_is_not_here_is_planned_by_its_memory(tmp_path):
    """The sizes of an 8B model: 16 GB of weights in bfloat16, 128 KiB of cache a token."""
    config = SHAPES["llama-8b"] | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _write_headers(tmp_path / "model.safetensors", config)
    plan = make_forecast(str(tmp_path), "none", PlanOptions(memory=24 * GIB, device="cuda", context=8192))
    (target,) = plan.models
    assert target.weights == pytest.approx(16.06e9, rel=0.001)
    assert target.per_token == 131_072
    assert plan.own == DRIVER + LIBRARIES
    assert not plan.fits or plan.at_start < 24 * GIB
    assert plan.tokens < 8 * 8192, "eight long texts do not fit beside 16 GB of weights"
    with pytest.raises(ConfigError, match="no CUDA device here"):
        make_forecast(str(tmp_path), "none", PlanOptions(device="cuda"))


def _write_headers(file, config):
    """A safetensors file with the header of such a model, and no data that is ever read."""
    from outrider.models.families import parse_config
    from outrider.models.load import _expected_shapes

    header, at = {}, 0
    for name, shape in _expected_shapes(parse_config(config)).items():
        size = 2
        for each in shape:
            size *= each
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)  # a hole, not bytes


def test_what_fits_grows_with_memory_and_shrinks_with_the_batch(pair):
    few, many = (make_forecast(pair[0], "none", PlanOptions(memory=m, device="cuda")) for m in (1400 << 20, 1800 << 20))
    assert [fit.batch for fit in few.largest] == sorted(fit.batch for fit in few.largest)
    contexts = [fit.context for fit in few.largest]
    assert contexts == sorted(contexts, reverse=True)
    assert many.largest[-1].context * many.largest[-1].batch > few.largest[-1].context * few.largest[-1].batch
    assert many.largest_draft > few.largest_draft


def test_the_longest_context_fits_and_a_longer_one_does_not(pair):
    memory = 1400 << 20
    plan = make_forecast(pair[0], "none", PlanOptions(memory=memory, device="cuda"))
    fit = next(each for each in plan.largest if each.context < 4000)
    for more, fits in ((0, True), (32, False)):
        options = PlanOptions(
            memory=memory,
            device="cuda",
            max_batch=fit.batch,
            context=fit.context + more,
            cache_tokens=fit.batch * (fit.context + more),
        )
        assert make_forecast(pair[0], "none", options).fits == fits


def test_the_largest_draft_fits_and_one_twice_as_large_does_not(pair):
    """A draft of the target's proportions: its weights and cache, grown by one factor."""
    memory = 1800 << 20
    plan = make_forecast(pair[0], "none", PlanOptions(memory=memory, device="cuda"))
    target = plan.models[0]
    growth = plan.largest_draft / target.weights
    takes = growth * (target.weights + plan.tokens * target.per_token)
    left = memory - plan.own - target.weights - plan.cache - 2 * target.kept_free - (256 << 20)
    assert takes == pytest.approx(left, rel=0.01)


def test_a_draft_model_takes_its_weights_and_as_many_tokens(pair):
    options = PlanOptions(memory=MEMORY, device="cpu")
    alone = make_forecast(pair[0], "none", options)
    both = make_forecast(pair[0], f"draft-model:model={pair[1]}", options)
    (draft,) = both.models[1:]
    assert (draft.role, draft.per_token) == ("draft model", alone.per_token // 2)
    assert both.at_start - alone.at_start == pytest.approx(draft.weights + both.tokens * draft.per_token, rel=0.05)


def test_two_models_on_a_gpu_share_what_their_passes_give_back(pair):
    """A draft model has buffers, tables and graphs of its own, five of its lengths of chains for each of four sizes of
    batch among them; the memory that sampling leaves to the allocator serves both."""
    options = PlanOptions(memory=MEMORY, device="cuda", max_batch=8, context=512)
    alone = make_forecast(pair[0], "none", options)
    both = make_forecast(pair[0], f"draft-model:model={pair[1]},k=8", options)
    target, draft = both.models
    assert target.logits == draft.logits > 0
    added = draft.weights + (both.tokens + 16) * draft.per_token + draft.tables + draft.buffers + draft.graphs
    wider = target.graphs + target.buffers - alone.models[0].graphs - alone.models[0].buffers
    assert both.at_start - alone.at_start == added + wider
    short = make_forecast(pair[0], f"draft-model:model={pair[1]},k=5", options)
    assert draft.graphs - short.models[1].graphs == 4 * GRAPH


def test_memory_that_is_short_is_said_with_what_would_fit(pair):
    run = CliRunner().invoke(app, ["plan", pair[0], "--memory", "900MiB", "--device", "cuda", "--max-batch", "64"])
    assert run.exit_code == 1
    assert "Does not fit in 900 MiB" in run.output
    run = CliRunner().invoke(app, ["plan", pair[0], "--memory", "1.35GiB", "--device", "cuda", "--context", "4096"])
    assert "--max-batch" in run.output


def test_the_plan_as_json_and_as_a_page(pair, tmp_path):
    page = tmp_path / "plan.html"
    spec = f"draft-model:model={pair[1]}"
    words = ["plan", pair[0], "--drafter", spec, "--memory", "2", "--device", "cpu", "--json", "--html", str(page)]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0
    said = json.loads(run.stdout)
    assert said["fits"] is True
    assert said["memory"] == 2 * GIB
    cache = said["cache"]["bytes"]
    parts = sum(m["weights"] + m["tables"] for m in said["models"])
    assert said["at_start"] == cache + parts + said["driver_and_libraries"]
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_headers_name_models_and_no_path_is_cut(pair):
    run = CliRunner().invoke(app, ["plan", pair[0], "--drafter", f"draft-model:model={pair[1]}", "--memory", "2"])
    assert "…" not in run.output
    assert f"draft model: {Path(pair[1]).name}" in run.output


def test_no_sequence_is_said_to_be_longer_than_the_cache(pair):
    small = make_forecast(pair[0], "none", PlanOptions(device="cpu", memory=MEMORY, cache_tokens=64))
    assert small.context > 64
    assert summary(small).endswith("a cache of 64 tokens that at most 8 sequences share, each of up to 64.")
    whole = make_forecast(pair[0], "none", PlanOptions(device="cpu", memory=MEMORY, cache_tokens=64, context=8))
    assert summary(whole).endswith("a cache of 64 tokens for 8 sequences of up to 8.")


def test_no_room_for_a_draft_is_said(pair):
    run = CliRunner().invoke(app, ["plan", pair[0], "--drafter", "none", "--memory", "1MiB", "--device", "cpu"])
    assert "largest draft model: none fits" in run.output


def test_sizes_of_memory():
    assert [parse_size(text) for text in ("24", "24GiB", "80GB", "512 MiB", "1.5g", "100b", None)] == [
        24 * GIB, 24 * GIB, 80 * 10**9, 512 << 20, 15 * 10**8, 100, None
    ]  # fmt: skip
    for wrong in ("", "much", "-1", "0", "3 bytes"):
        with pytest.raises(ConfigError, match="--memory takes a size"):
            parse_size(wrong)
