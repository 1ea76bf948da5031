"""The page's own files: its modules by their tests in Node, its size, its colours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from scripted_api import PAGE

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in Path(str(PAGE)).iterdir()}


def test_modules_in_node() -> None:
    """The modules that need no document, by their own tests."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the page's module tests need it")
    tests = sorted(Path(__file__).parent.glob("*.test.mjs"))
    env = {**os.environ, "PAGE": str(PAGE)}
    load = "; ".join(f"await import({json.dumps(test.as_uri())})" for test in tests)  # one process for all
    command = [node, "--test-reporter=tap", "--input-type=module", "--eval", load]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout


def test_small_and_self_contained() -> None:
    assert sum(len(text.encode()) for text in SOURCES.values()) <= 250_000
    html = SOURCES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    scripts = ['<script src="/page/theme.js">', '<script type="module" src="/page/app.js">']
    assert re.findall(r"<script[^>]*>", html) == scripts
    for name, text in SOURCES.items():
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name  # a namespace, never fetched
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours written #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    pairs_of = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", SOURCES["theme.css"])
    colour = {name: values[scheme] for name, *values in pairs_of}
    grounds = ["ground", "panel", "raised", "chosen", "accepted-ground", "recovered-ground", "bonus-ground"]
    pairs = [("ink", ground) for ground in grounds]
    pairs += [("muted", "ground"), ("muted", "panel"), ("muted", "raised"), ("on-accent", "accent")]
    pairs += [("accent", "ground"), ("accent", "panel")]
    pairs += [("error", "error-ground"), ("error", "ground"), ("error", "panel")]
    low = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    marks = [("accepted", "accepted-ground"), ("recovered", "recovered-ground"), ("bonus", "bonus-ground")]
    marks += [("focus", "ground"), ("focus", "panel"), ("field", "panel"), ("field", "ground")]
    faint = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in marks}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 3} == {}  # WCAG 1.4.11: marks and outlines
