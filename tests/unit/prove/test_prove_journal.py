"""A proof that was interrupted continues, and another one begins anew; what the exit codes and pages say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.prove.checks import Check, Proof, Status
from outrider.prove.journal import FILE, Journal, Task, run_tasks
from outrider.prove.page import proof_page


def check(name: str, status: Status = "holds", **figures: object) -> Check:
    return Check(group="texts", name=name, status=status, detail="<b>why</b>", figures=dict(figures))


class Work:
    """Tasks that are counted; one is interrupted at first."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.interrupted = False

    def tasks(self) -> list[Task]:
        return [Task(key, lambda key=key: self._run(key)) for key in ("a", "b", "c")]

    def _run(self, key: str) -> Iterator[Check]:
        self.ran.append(key)
        if key == "b" and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        yield check(key, number=1.5)


def quiet(key: str, done: int, total: int) -> None:
    pass


def test_an_interrupted_proof_continues(tmp_path: Path):
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(work.tasks(), Journal(tmp_path, {"model": "x"}), quiet)
    again = Journal(tmp_path, {"model": "x"})
    assert [each.name for each in run_tasks(work.tasks(), again, quiet)] == ["a", "b", "c"]
    assert work.ran == ["a", "b", "b", "c"]
    assert Journal(tmp_path, {"model": "x"}).done == again.done
    again.close()
    assert Journal(tmp_path, {"model": "x"}).done == {}


def test_a_proof_of_something_else_begins_anew(tmp_path: Path):
    Journal(tmp_path, {"model": "x"}).add("a", [check("a")])
    assert Journal(tmp_path, {"model": "y"}).done == {}


def test_a_line_that_was_cut_is_left_out(tmp_path: Path):
    journal = Journal(tmp_path, {"model": "x"})
    journal.add("a", [check("a")])
    with (tmp_path / FILE).open("a") as out:
        out.write('{"key": "b", "che')
    again = Journal(tmp_path, {"model": "x"})
    assert list(again.done) == ["a"]
    again.add("b", [check("b")])
    assert list(Journal(tmp_path, {"model": "x"}).done) == ["a", "b"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"journal\.jsonl: Not a directory; delete it, or name another folder with --out"
    ):
        Journal(tmp_path / "file" / "folder", {})


@pytest.mark.parametrize(
    ("states", "code", "verdict"),
    [
        (["holds", "holds"], 0, "holds: all 2 checks"),
        (["holds", "tie"], 0, "holds: all 2 checks, 1 of them up to ties within rounding"),
        (["holds", "not checked"], 3, "incomplete: no check fails, and 1 of 2 could not be made"),
        (["fails", "not checked"], 1, "does not hold: 1 of 2 checks fail"),
        ([], 3, "incomplete: no check fails, and 0 of 0 could not be made"),
    ],
)
def test_the_exit_code_is_0_only_if_everything_holds(states: list[Status], code: int, verdict: str):
    proof = Proof({"model": "x"}, [check(str(i), state) for i, state in enumerate(states)], 1.0)
    assert (proof.exit_code, proof.verdict) == (code, verdict)


def test_a_page_says_in_its_first_line_what_holds():
    page = proof_page(Proof({"model": "x", "modes": ["seeded", "distribution"]}, [check("one", tokens=24)], 1.0))
    assert "<b>No change by speculation was found</b>: holds: all 1 checks. 1 texts of 24 tokens are the same" in page
    assert "seeded, distribution" in page
    assert "Not proved" in proof_page(Proof({"model": "x"}, [check("one", "not checked")], 1.0))


def pooled(mode: str, towards: str, bias: float | None, status: Status = "holds", compared: int = 1500) -> Check:
    return check("all", status, pooled_mode=mode, towards=towards, visible_bias=bias, compared=compared, limit=9.0)


def test_the_headline_says_how_small_a_fault_would_have_shown():
    texts = [check("one", tokens=1000), check("two", tokens=500), check("three", "tie", tokens=24), check("drafts")]
    likely, drafted = "the likeliest token", "drafted tokens"
    rows = [
        pooled("seeded", likely, None, compared=40),
        pooled("seeded", likely, None, compared=40),
        pooled("distribution", likely, 0.09),
        pooled("distribution", likely, 0.061),
        pooled("distribution", drafted, 0.03, compared=700),
        pooled("distribution", "the likeliest draft token", None, compared=20),
    ]
    proof = Proof({"model": "x"}, [*texts, *rows], 1.0)
    assert proof.headline == (
        "holds: all 10 checks, 1 of them up to ties within rounding. "
        "2 texts of 1,500 tokens are the same, token by token. "
        "40 sampled tokens (seeded) are too few to show a fault of any size; raise --draws. "
        "In 1,500 sampled tokens (distribution) a fault that moves probability, 6.1 % to the likeliest token, or "
        "3.0 % to drafted tokens, would have shown; a smaller one may not have."
    )
    assert proof.as_dict()["shown"] == proof.shown
    assert "No sampled texts were compared" in Proof({"model": "x"}, texts, 1.0).headline
    failed = Proof({"model": "x"}, [*texts, pooled("seeded", likely, 0.1, "fails")], 1.0)
    assert failed.headline == "does not hold: 1 of 5 checks fail."


def test_reports_hold_every_check_and_escape_what_they_are_told():
    proof = Proof({"model": "<i>x</i>"}, [check("one", evidence={"logs": []}, tokens=3), check("two", "fails")], 1.0)
    told = json.loads(json.dumps(proof.as_dict()))
    assert told["verdict"] == "fails"
    assert [each["figures"] for each in told["checks"]] == [{"tokens": 3}, {}]
    page = proof_page(proof)
    assert (
        "<b>Not lossless, speculation changed a text or a distribution</b>: does not hold: 1 of 2 checks fail.<" in page
    )
    assert "<i>" not in page
    assert page.count("&lt;b&gt;why") == 3  # the one that fails is told first, too
