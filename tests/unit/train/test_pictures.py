"""What training draws: curves in the terminal, plots of a run."""

import io

import pytest
from rich.console import Console

from outrider.cli import train_screen
from outrider.cli.train_screen import BARS, CollectScreen, TrainScreen, bar, curve, minutes
from outrider.train.config import Sizes
from outrider.train.report import training_plots
from outrider.train.state import RunState


def step(number, loss):
    return {"step": number, "loss": loss, "seconds": 2.0 * number, "rate": 1000.0}


def look(number, tau):
    return {"step": number, "greedy": (0.5, 0.25), "sampled": (0.6, 0.3), "tau": tau, "tau_sampled": tau + 0.1}


def test_a_curve_shows_low_and_high():
    assert curve([0.0, 1.0, 2.0, 7.0]) == BARS[0] + BARS[1] + BARS[2] + BARS[7]
    assert curve([3.0, 3.0]) == BARS[0] * 2
    assert curve([]) == ""
    assert len(curve([float(i) for i in range(1000)], 60)) == 60
    assert curve([1.0, 3.0, 5.0, 7.0], 2) == BARS[0] + BARS[7], "each bar is a mean"


def test_bars_and_times():
    assert bar(0.5).count("━") == len(bar(0.5)) / 2
    assert bar(7.0) == bar(1.0)
    assert minutes(125.9) == "2:05"


@pytest.mark.parametrize("terminal", [True, False])
def test_training_is_drawn_or_told(terminal, monkeypatch):
    monkeypatch.setattr(train_screen, "TELL_SECONDS", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with TrainScreen(console) as screen:
        screen.begin(Sizes(10, 2, 1, 20, 10, 0), RunState(history=[look(0, 1.0), step(1, 3.0)]))
        screen.step(step(2, 2.5))
        screen.judged(look(2, 1.875))
        screen.measured()
    said = out.getvalue()
    for words in ("step 2 of 20", "2.5", "1.88", "0.50", "0.25", "speed measured on 1 prompts"):
        assert words in said, words
    assert ("\x1b[" in said) == terminal


def test_collection_is_told_to_its_end():
    out = io.StringIO()
    with CollectScreen(Console(file=out, width=100)) as screen:
        screen.start(4, 1)
        for _ in range(3):
            screen.add(1, 100)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("1 of 4 answers")
    assert lines[-1].startswith("4 of 4 answers, 300 tokens")


def test_the_plots_of_a_run():
    loss, tau, positions = training_plots([look(0, 1.0), step(1, 3.0), step(2, 2.0), look(2, 1.5)])
    assert loss.count("<polyline") == 1
    assert tau.count("<polyline") == 2
    assert "position 2" in positions
