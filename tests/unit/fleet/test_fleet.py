"""Replays of arrivals against made-up costs, checked by hand; and the whole command on a tiny model."""

import json
import random
from dataclasses import replace

import pytest

from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.fleet.costs import RoundCost, ServingCosts, interpolate, read_costs
from outrider.fleet.measure import kept_costs, measure_costs
from outrider.fleet.page import fleet_page
from outrider.fleet.simulate import SharedMachine, simulate
from outrider.fleet.size import Goals, fewest, make_plan, parse_replicas
from outrider.fleet.trace import Arrival, Trace, closed_loop, read_trace
from outrider.llm import LLM
from outrider.testing.synthetic import synthetic_pair

# A round takes 10 ms and 2 for each further sequence; a prompt token 1 ms, of a round that takes 10 in any case.
COSTS = ServingCosts(
    plain=(RoundCost(1, 0.010, 1), RoundCost(4, 0.016, 1)),
    speculative=(RoundCost(1, 0.012, 2), RoundCost(4, 0.024, 1.5)),
    prompts=((1, 0.010), (10, 0.010), (20, 0.020)),
    context=0.0,
    context_seconds=0.0,
    prompt_context_seconds=0.0,
    max_batch=4,
    max_round_tokens=20,
    cache_tokens=1000,
)


def trace(*arrivals):
    return Trace("made", tuple(Arrival(*each) for each in arrivals))


def test_one_request_by_hand():
    # 45 prompt tokens in chunks of 20, 20 and 5: 20 + 20 + 10 ms; then 4 rounds of 10 ms
    (served,) = simulate(trace((1.0, 45, 5)), COSTS, 1, speculate=False).served
    assert served.ttft == pytest.approx(0.050)
    assert served.end == pytest.approx(1.090)
    assert served.tpot == pytest.approx(0.010)
    # two tokens a round: 4 tokens after the first take two rounds of 12 ms
    (served,) = simulate(trace((1.0, 45, 5)), COSTS, 1, speculate=True).served
    assert served.end == pytest.approx(1.050 + 0.024)


def test_a_prompt_is_read_beside_another_that_decodes():
    # the second arrives 5 ms into the first's round of 10 ms, is read in the next: 10 + (19 - 10) ms, since a token of
    # the round is the other's; the last prompt token in a round of 10 ms; then both decode, 12 ms a round
    run = simulate(trace((0.0, 10, 10), (0.015, 20, 3)), COSTS, 1, speculate=False)
    second = min(run.served, key=lambda each: each.output)
    assert second.first == pytest.approx(0.020 + 0.019 + 0.010)
    assert second.end == pytest.approx(second.first + 2 * 0.012)
    first = max(run.served, key=lambda each: each.output)
    # 1 token from its prompt, 1 before the second is read, 2 beside its prompt, 2 beside it, 4 alone
    assert first.end == pytest.approx(second.end + 4 * 0.010)


def test_the_batch_and_the_cache_bound_who_joins():
    five = [(0.0, 5, 10)] * 5
    one_by_one = simulate(trace(*five), replace(COSTS, max_batch=1), 1, speculate=False)
    assert one_by_one.seconds == pytest.approx(5 * (0.010 + 9 * 0.010))
    by_cache = simulate(trace(*five), replace(COSTS, cache_tokens=15), 1, speculate=False)
    assert by_cache.seconds == pytest.approx(one_by_one.seconds)
    together = simulate(trace(*five[:4]), COSTS, 1, speculate=False)
    # the first is read alone, the others beside its second token; it ends a round before them
    assert together.seconds == pytest.approx(0.010 + (0.010 + 0.005) + 8 * 0.016 + 0.014)


def test_context_makes_rounds_longer():
    costs = replace(COSTS, context=10.0, context_seconds=1e-4, prompt_context_seconds=1e-5)
    (served,) = simulate(trace((0.0, 25, 4)), costs, 1, speculate=False).served
    assert served.first == pytest.approx(0.020 + 0.010 + 1e-5 * 5 * 20 - 0 * 1e-4)
    # rounds at 26, 27 and 28 tokens, timed at 10
    assert served.end - served.first == pytest.approx(3 * 0.010 + 1e-4 * (16 + 17 + 18))


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("clients", [0, 6])
def test_rounds_in_one_step_are_those_one_by_one(speculate, clients):
    draw = random.Random(7)
    costs = replace(COSTS, context=30.0, context_seconds=2e-5, prompt_context_seconds=1e-6, cache_tokens=300)
    now, made = 0.0, []
    for _ in range(120):
        made.append((now, draw.randint(1, 60), draw.randint(1, 40)))
        now += draw.expovariate(8.0)
    given = replace(trace(*made), clients=clients)
    for replicas in (1, 3):
        steps = simulate(given, costs, replicas, speculate=speculate)
        single = simulate(given, costs, replicas, speculate=speculate, step=1)
        assert len(steps.served) == len(single.served) == 120
        key = lambda each: (each.arrival, each.prompt, each.output)  # noqa: E731
        for a, b in zip(sorted(steps.served, key=key), sorted(single.served, key=key), strict=True):
            assert (a.first, a.end) == pytest.approx((b.first, b.end), abs=1e-6)
        assert (steps.busy, steps.batch) == pytest.approx((single.busy, single.batch))


def test_a_request_goes_where_the_fewest_are_under_way():
    run = simulate(
        trace((0.0, 10, 50), (0.0, 10, 50), (0.001, 10, 50)), replace(COSTS, max_batch=1), 2, speculate=False
    )
    ends = sorted(each.end for each in run.served)
    assert ends == pytest.approx([0.5, 0.5, 1.0])
    assert run.busy == pytest.approx(1.5)
    # the third waits until one of the others ends; nobody shares a round
    assert sorted(each.wait for each in run.served) == pytest.approx([0, 0, 0.499])
    assert run.batch == pytest.approx(1)


def test_the_batch_is_the_mean_over_the_time_of_rounds():
    # 10 ms of one that reads; 10 of its round beside another's prompt; 4 of two at 12 ms, one of which ends; 4 at 10 ms
    run = simulate(trace((0.0, 10, 10), (0.005, 10, 5)), COSTS, 1, speculate=False)
    assert run.busy == pytest.approx(0.010 + 0.010 + 4 * 0.012 + 4 * 0.010)
    assert run.batch == pytest.approx((0.010 + 2 * (0.010 + 4 * 0.012) + 4 * 0.010) / run.busy)
    (row,) = make_plan(trace((0.0, 10, 10), (0.005, 10, 5)), replace(COSTS, speculative=()), Goals()).rows
    assert row.batch == run.batch
    assert row.wait_ms[99] == pytest.approx(1e3 * max(each.wait for each in run.served), rel=0.02)


def test_a_page_says_what_computing_and_the_batch_mean_and_holds_a_column_for_goals_only():
    load = read_trace("poisson:rate=20,prompt=20,output=20,count=100,seed=3")
    told = fleet_page(make_plan(load, COSTS, Goals(), [1]))
    for words in ("the mean, of at most 4.", "replicas are full: add one", "neither good nor bad", "--ttft-ms"):
        assert words in told, words
    assert "<th>holds</th>" not in told
    assert "<th>holds</th>" in fleet_page(make_plan(load, COSTS, Goals(ttft_ms=100)))


def test_clients_ask_one_after_another():
    run = simulate(closed_loop([(10, 11)] * 6, clients=2), COSTS, 2, speculate=False)
    assert sorted(each.arrival for each in run.served) == pytest.approx([0, 0, 0.11, 0.11, 0.22, 0.22])
    assert run.seconds == pytest.approx(0.33)
    alone = simulate(closed_loop([(10, 11)] * 6, clients=1), COSTS, 2, speculate=False)
    assert alone.seconds == pytest.approx(0.66)


def test_costs_between_and_beyond():
    assert COSTS.round_cost(2, False) == pytest.approx((0.012, 1))
    assert COSTS.round_cost(8, True) == pytest.approx((0.040, 1.5))
    assert interpolate([(1, 5.0), (2, 3.0)], 4) == 3.0, "never falling beyond the last"
    assert COSTS.prompt_seconds(30) == pytest.approx(0.030)


def test_the_fewest_replicas_that_hold():
    for needed in range(1, 40):
        for first in (1, 3, 16, 40):
            asked = []

            def holds(count, needed=needed, asked=asked):
                asked.append(count)
                return count >= needed

            assert fewest(holds, first, 64) == needed
            assert len(asked) == len(set(asked))
    assert fewest(lambda _: False, 3, 64) is None


def test_a_plan_by_goals_and_by_numbers():
    load = read_trace("poisson:rate=20,prompt=20,output=20,count=400,seed=3")
    plan = make_plan(load, COSTS, Goals(ttft_ms=100))
    found = {(row.speculate, row.replicas): row for row in plan.rows}
    for speculate, needed in plan.needed.items():
        assert found[speculate, needed].holds
        assert found[speculate, needed].ttft_ms[99] <= 100
        assert not found[speculate, needed - 1].holds
    assert plan.needed[True] <= plan.needed[False]
    row = found[False, plan.needed[False]]
    assert row.output_throughput == pytest.approx(20 * row.request_throughput)
    assert make_plan(load, COSTS, Goals(tpot_ms=0.001)).needed == {False: None, True: None}
    assert [(r.replicas, r.speculate) for r in make_plan(load, COSTS, Goals(), [2, 5]).rows] == [
        (2, False), (5, False), (2, True), (5, True),
    ]  # fmt: skip
    (plain,) = make_plan(load, replace(COSTS, speculative=()), Goals()).rows
    assert (plain.replicas, plain.holds) == (1, None)


def test_traces(tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text)
        return read_trace(str(tmp_path / name)).arrivals

    two = (Arrival(0.5, 7, 3), Arrival(2.0, 9, 4))
    own = [{"arrival": each.seconds, "prompt_tokens": each.prompt, "output_tokens": each.output} for each in two]
    assert written("own.jsonl", "\n".join(map(json.dumps, reversed(own)))) == two
    mooncake = (
        '{"timestamp": 500, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 2000, "input_length": 9, "output_length": 4}\n'
    )
    assert written("mooncake.jsonl", mooncake) == two
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0.5,ChatGPT,7,3,10,Conversation log\n"
    )
    assert written("burst.csv", burst + "1,ChatGPT,8,0,8,API log\n2,GPT-4,9,4,13,API log\n") == two
    assert (
        written("bench.json", '{"start_times": [0.5, 1, 2], "input_lens": [7, 1, 9], "output_lens": [3, 0, 4]}') == two
    )
    for text in ("", "[1]\n", '{"arrival": 1}\n', '{"arrival": 1, "prompt_tokens": 0, "output_tokens": 4}\n'):
        with pytest.raises(ConfigError, match="--fleet"):
            written("wrong.jsonl", text)
    for name, text, told in (
        ("wrong.json", "{no", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ("wrong.json", "[1]", "a value of another kind"),
        ("wrong.csv", "a,b\n1,2\n", "without 'Timestamp'"),
        (
            "wrong.jsonl",
            '{"arrival": 1, "prompt_tokens": 2, "output_tokens": 4}\n\n{"arrival": 2}',
            "line 3: without 'p",
        ),
        ("wrong.jsonl", "\nhello", "line 2: not JSON"),
    ):
        with pytest.raises(ConfigError, match="not a trace") as caught:
            written(name, text)
        assert told in str(caught.value)
        assert "Error(" not in str(caught.value)


def test_a_trace_that_cannot_be_read_is_told_without_numbers_of_the_system(tmp_path):
    for name, told in (
        (tmp_path / "nothing.json", "No such file or directory; it is"),
        (tmp_path, "Is a directory; it is"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            read_trace(str(name))
        assert "Errno" not in str(caught.value)
    (tmp_path / "weights").write_bytes(bytes([255, 254, 200]))
    with pytest.raises(ConfigError, match="not UTF-8 text; it is lines"):
        read_trace(str(tmp_path / "weights"))


def test_generators():
    made = read_trace("poisson:rate=5,prompt=10-20,output=7,count=2000,seed=1")
    assert made.rate == pytest.approx(5, rel=0.1)
    assert {each.output for each in made.arrivals} == {7}
    assert {each.prompt for each in made.arrivals} == set(range(10, 21))
    closed = read_trace("closed:clients=3,prompt=10,output=7,count=5")
    assert (closed.clients, len(closed.arrivals), closed.rate) == (3, 5, 0.0)
    for wrong in (
        "poisson:rate=0,prompt=1,output=1",
        "poisson:rate=1,prompt=1",
        "closed:clients=1.5,prompt=1,output=1",
        "poisson:rate=1,prompt=5-2,output=1",
        "poisson:rate=1,prompt=5,output=1,burst=2",
        "no-file",
    ):
        with pytest.raises(ConfigError, match="poisson:rate=2"):
            read_trace(wrong)
    with pytest.raises(ConfigError, match="without output, prompt"):
        read_trace("poisson:rate=5")
    for wrong in ("0", "a", "1,99999999"):
        with pytest.raises(ConfigError, match="--replicas"):
            parse_replicas(wrong)


def test_costs_in_a_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS.as_json()))
    assert read_costs(file) == COSTS
    file.write_text(json.dumps({"costs": COSTS.as_json()}))
    assert read_costs(file) == COSTS
    whole = COSTS.as_json()
    for change in (
        {"plain": []},
        {"prompts": []},
        {"max_batch": 0},
        {"no": 1},
        {"context": 100.0, "context_seconds": 1.0},
    ):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(ConfigError):
            read_costs(file)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return synthetic_pair("tiny", agreement=0.9, seed=3).save(tmp_path_factory.mktemp("pair"))


def test_costs_are_measured_by_rounds_of_the_engine(pair, tmp_path):
    """By a clock that ticks once for each look: a round is a tick."""
    target, draft = pair
    ticks = iter(range(1 << 30))
    with LLM(target, drafter=f"draft-model:model={draft}", device="cpu", max_batch=3, adaptive=False) as llm:
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
        found = measure_costs(llm, prompts, lambda _: None, clock=lambda: float(next(ticks)))
        assert [each.batch for each in found.plain] == [each.batch for each in found.speculative] == [1, 2, 3]
        assert all(each.seconds == pytest.approx(1.0) and each.tokens == 1 for each in found.plain)
        assert all(each.tokens > 1.5 for each in found.speculative), "the draft agrees with the target"
        assert all(each.seconds == pytest.approx(1.0) for each in found.speculative)
        assert not llm.engine.busy
        llm.engine.check()
        first = kept_costs(llm, prompts, tmp_path, lambda _: None)
        assert kept_costs(llm, prompts, tmp_path, lambda _: pytest.fail("measured again")) == first
        assert len(list(tmp_path.glob("serving-*.json"))) == 1


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, words)])
    return end.value.code


def test_the_command(pair, tmp_path, capsys):
    load = "poisson:rate=3,prompt=20,output=20,count=50"
    file, page = tmp_path / "costs.json", tmp_path / "fleet.html"
    file.write_text(json.dumps(COSTS.as_json() | {"what": "a <made> model"}))
    assert run("--fleet", load, "--costs", file, "--latency-ms", 300, "--html", page, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["needed"]["off"] >= 1
    assert told["trace"]["output_tokens"] == 1000
    assert "a &lt;made&gt; model" in page.read_text()
    assert run("--fleet", load, "--costs", file, "--replicas", "1,2") == 0
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:5]] == [
        ["1", "off"],
        ["2", "off"],
        ["1", "on"],
        ["2", "on"],
    ]
    assert run("--fleet", load, "--costs", file, "--tpot-ms", 0.01) == 1
    assert "no number holds it" in capsys.readouterr().out
    assert run("--replicas", 2) == 2
    assert "--fleet TRACE" in capsys.readouterr().err
    assert run("--fleet", load, "--ttft-ms", -1) == 2
    assert run(pair[0], "--fleet", load, "--memory", "1GiB") == 2
    capsys.readouterr()


def test_the_command_measures_where_no_costs_are_given(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tell me\nask another\n")
    load = "poisson:rate=3,prompt=20,output=20,count=10"
    words = (pair[0], "--fleet", load, "--prompts", prompts, "--device", "cpu", "--max-batch", 2, "--json")
    assert run(*words, "--drafter", "suffix") == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["batch"] for each in told["costs"]["plain"]] == [1, 2]
    assert "suffix" in told["costs"]["what"]
    assert len(list((tmp_path / "costs").glob("serving-*.json"))) == 1


def test_drafts_take_room_from_prompts():
    # rounds of 20: beside one that decodes, a prompt of 30 has 19 tokens of the first; with drafts of 4, only 15
    asked = trace((0.0, 10, 20), (0.010, 30, 1))
    room = simulate(asked, COSTS, 1, speculate=True, step=1).served
    drafts = simulate(asked, replace(COSTS, draft_tokens=4), 1, speculate=True, step=1).served
    # 12 ms and 9 for 19 tokens, 12 and 1 for 11; against 12 and 5 for 15, twice
    assert min(room, key=lambda each: each.output).ttft == pytest.approx(0.021 + 0.013)
    assert min(drafts, key=lambda each: each.output).ttft == pytest.approx(0.017 + 0.017)
    many = simulate(asked, replace(COSTS, draft_tokens=100), 1, speculate=True, step=1).served
    # at most half of 19: chunks of 10, 10 and 10, which add nothing to a round
    assert min(many, key=lambda each: each.output).ttft == pytest.approx(0.036)
    off = simulate(asked, replace(COSTS, draft_tokens=4), 1, speculate=False, step=1).served
    assert min(off, key=lambda each: each.output).ttft == pytest.approx(0.019 + 0.011)


def test_replicas_on_one_machine_share_its_cores():
    asked = trace((0.0, 10, 11), (0.0, 10, 11))  # each has a replica: 10 ms for the prompt, then 10 rounds of 10 ms

    def ends(replicas, cores, chunk_seconds, speculate=False):
        machine = SharedMachine(cores, chunk_seconds)
        run = simulate(asked, COSTS, replicas, speculate=speculate, machine=machine)
        return sorted(each.end for each in run.served)

    assert ends(2, 2, 0.0) == pytest.approx([0.110, 0.110])
    # 1 ms of other work for each chunk: 11 ms of a core for what was 10
    assert ends(2, 2, 0.001) == pytest.approx([0.120, 0.120])
    # the same for the two tokens of a round with drafts: 13 ms for what was 12, 5 times after the prompt's 10
    assert ends(2, 2, 0.001, speculate=True) == pytest.approx([0.075, 0.075])
    # one core: the first round finds it free, every later one another replica
    assert ends(2, 1, 0.0) == pytest.approx([0.210, 0.220], abs=0.011)
    # one replica with both: a round of 2 takes 12 ms, and a core is left for the rest
    assert ends(1, 2, 0.001) == ends(1, 2, 0.0)
