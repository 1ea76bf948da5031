"""`outrider bench rounds`: the table, the profile, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest


def test_plain_and_speculative_side_by_side(cli):
    done = cli("bench", "rounds", "synthetic", "--batch", "2", "--max-tokens", "64", "--device", "cpu", "--fixed")
    assert done.code == 0, done.err
    lines = {line.split("  ")[0].strip(): line for line in done.out.splitlines()}
    assert "2 of 2" in lines["identical"]
    assert "1.00" in lines["α"]
    for name in ("tok/s", "τ", "ms a round", "draft", "verify", "host", "speed-up"):
        assert any(line.strip().startswith(name) for line in done.out.splitlines()), name


def test_json_of_both(cli):
    done = cli("bench", "rounds", "synthetic:tiny", "--max-tokens", "62", "--device", "cpu", "--json", "--fixed")
    told = json.loads(done.out)
    assert told["identical"] == 1.0
    assert (told["plain"]["tau"], told["plain"]["gamma"]) == (1.0, 0.0)
    assert told["speculative"]["tau"] > 5
    assert told["speculative"]["alpha"] == 1.0
    assert told["speedup"] == pytest.approx(
        told["speculative"]["tokens_per_second"] / told["plain"]["tokens_per_second"]
    )


def test_the_rows_agree_as_they_are_printed(cli):
    """The same identities in the table, where each number is rounded, and in JSON, where none is."""
    words = ("bench", "rounds", "synthetic", "--batch", "2", "--max-tokens", "64", "--device", "cpu", "--fixed")
    rows = {}
    for line in cli(*words).out.splitlines()[1:]:
        name, *numbers = re.split(r" {2,}", line.strip())
        rows[name] = [float(number) for number in numbers if re.fullmatch(r"\d+\.\d\d", number)]
    for column in (0, 1):
        parts = sum(rows[name][column] for name in ("draft", "verify", "host"))
        assert parts == pytest.approx(rows["ms a round"][column], abs=1e-9)
    assert rows["τ"][0] == 1
    assert rows["τ"][1] <= rows["γ"][0] + 1
    told = json.loads(cli(*words, "--json").out)
    for kind in ("plain", "speculative"):
        found = told[kind]
        assert found["draft_ms"] + found["verify_ms"] + found["host_ms"] == pytest.approx(found["round_ms"])
        assert found["tokens_per_second"] * found["round_ms"] / 1000 == pytest.approx(2 * found["tau"])
        assert 1 <= found["tau"] <= found["gamma"] + 1 + 1e-9


def test_another_drafter_may_be_named(cli):
    told = json.loads(cli("bench", "rounds", "synthetic", "--drafter", "none", "--max-tokens", "8", "--json").out)
    assert told["speculative"]["gamma"] == 0


def test_profile_names_operators(cli):
    done = cli("bench", "rounds", "synthetic", "--profile", "--rounds", "2", "--device", "cpu", "--fixed")
    assert done.code == 0, done.err
    assert "operators of a round" in done.out
    assert "aten::mm" in done.out
    done = cli("bench", "rounds", "synthetic", "--profile", "--rounds", "2", "--device", "cpu", "--json", "--fixed")
    told = json.loads(done.out)
    assert (told["model"], told["rounds"], told["device"]) == ("synthetic", 2, "cpu")
    assert told["tokens"] == 6.0  # five accepted draft tokens, and one token of the target's own
    assert any(cost["name"] == "aten::mm" for cost in told["costs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["synthetic:huge"], "choose one of: llama-8b"),
        (["synthetic", "--batch", "0"], "--batch must be 1 to 1024"),
        (["synthetic", "--max-tokens", "1"], "--max-tokens must be 2 to"),
        (["synthetic", "--max-tokens", "2", "--device", "cpu"], "a sequence finishes before all 1 decode together"),
        (
            ["synthetic", "--batch", "2", "--max-tokens", "12", "--device", "cpu", "--fixed"],
            "with speculative decoding",
        ),
        (["synthetic", "--profile", "--rounds", "900"], "at most 211"),
        (["synthetic", "--prompt", "a"], "gets random tokens"),
        (["synthetic", "--quantize", "int4"], "float weights"),
        (["synthetic", "--dtype", "int3"], "no dtype called 'int3'"),
        (["synthetic", "--device", "cpu", "--pinned"], "pinned"),
    ],
)
def test_what_cannot_be_is_said(cli, words, said):
    done = cli("bench", "rounds", *words)
    assert done.code == 2
    assert said in done.err
