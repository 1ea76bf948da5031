"""Every table of figures in the README names the records that its numbers are from, and they are in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = (ROOT / "README.md").read_text().split("\n## Figures\n")[1].split("\n## ")[0]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"benchmarks/results/([\w.-]+)")


def tables() -> list[tuple[str, str]]:
    """(table, the paragraph behind it)"""
    blocks = [block.strip() for block in FIGURES.split("\n\n")]
    return [(block, blocks[i + 1]) for i, block in enumerate(blocks) if block.startswith("|")]


def rounded(table_number: str, measured: list[str]) -> bool:
    """Whether some measured number, rounded as this one is, is this one."""
    digits = len(table_number.partition(".")[2])
    value = float(table_number.replace(",", ""))
    return any(abs(float(each.replace(",", "")) - value) <= 0.5000001 * 10**-digits for each in measured)


def missing(table: str, measured: list[str]) -> list[str]:
    """Numbers in its cells, but for ratios (3.2 ×), which may be computed, that are not measured ones."""
    cells = [cell for row in table.splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
    found = [number for cell in cells for number in NUMBER.findall(re.sub(r"[\d.]+ ×", "", cell))]
    return [number for number in found if not rounded(number, measured)]


@pytest.mark.parametrize(("table", "behind"), tables(), ids=lambda text: text.split("\n")[0][:40])
def test_the_numbers_of_a_table_are_in_its_records(table, behind):
    assert behind.startswith("Record"), f"the paragraph behind this table names no record: {behind[:60]!r}"
    names = LINK.findall(behind)
    assert names
    records = [json.loads((RESULTS / name).read_text()) for name in names]
    assert all(record["command"] and record["commit"] and record["machine"] for record in records)
    measured = [number for record in records for line in record["output"] for number in NUMBER.findall(line)]
    assert missing(table, measured) == []


def test_other_figures_name_a_record_too():
    """Paragraphs that tell a speed or a share as a decimal number; those in names of models are none."""
    for block in FIGURES.split("\n\n"):
        if re.search(r"(?<![\w.-])\d+\.\d", block) and not block.startswith("|"):
            assert LINK.search(block), block


def test_a_wrong_number_is_found():
    table = "| tok/s | a |\n|---|---|\n| row of 5 | 12.5 (3.1 ×), 1,200 |"
    assert missing(table, ["12.46", "1200.4"]) == []
    assert missing(table, ["12.6", "1199.2"]) == ["12.5", "1,200"]


def test_every_record_is_listed_and_names_no_place():
    listed = (RESULTS / "README.md").read_text()
    for file in RESULTS.glob("*.json*"):
        assert f"`{file.name}`" in listed, file.name
        text = file.read_text()
        assert not re.search(r"(?<![\w/:.])/(?:root|home|tmp|work|Users)/", text), file.name
        header = json.loads(text if file.suffix == ".json" else text.splitlines()[0])
        assert header["command"], file.name
        assert header["commit"], file.name
