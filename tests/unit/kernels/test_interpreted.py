"""The Triton kernels in Triton's interpreter, which needs no GPU: the small cases of tests/gpu, in a few processes."""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
Part = tuple[str, str, int]  # a file, which of its tests, how many those are at least
PROCESSES: list[list[Part]] = [  # of about the same time
    [("graphed_forward_on_cpu", "", 29), ("reduced_head", "kernel", 3)],
    [("fused_head", "", 11), ("packed_rows", "", 7), ("small_linear", "", 40), ("loss_kernels", "", 12)],
    [("fused_kernels", "", 50), ("lookup_kernels", "", 17), ("graphed_lookup", "captured", 3), ("accept", "", 85)],
    [
        ("sample_kernel", "", 20),
        ("block_kernels", "", 33),
        ("fused_block", "", 3),
        ("graphed_reads", "", 14),
        ("fetch_inputs", "", 8),
        ("shared_rows", "", 20),
        ("overlaid_chains", "", 13),
        ("attention_bits", "", 2),
    ],
]

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing them takes 3 s of each process; no test here uses one
}


def run_parts(root: Path, report: Path, parts: list[Part]) -> None:
    """Run these tests of tests/gpu under `root`; fails unless as many as expected ran, and all of them passed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    chosen = " or ".join(f"test_{name}.py" + (f" and {words}" if words else "") for name, words, _ in parts)
    done = subprocess.run(
        [*command, "-k", chosen, *(f"tests/gpu/test_{name}.py" for name, _, _ in parts)],
        cwd=root,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0, said
    (suite,) = ElementTree.parse(report).getroot()  # noqa: S314
    counts = {key: int(suite.attrib[key]) for key in ("failures", "errors", "skipped")}
    assert counts == {"failures": 0, "errors": 0, "skipped": 0}, said
    ran = Counter(case.attrib["classname"].rpartition(".")[2] for case in suite.iter("testcase"))
    for name, _, expected in parts:
        assert ran[f"test_{name}"] >= expected, said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize("parts", PROCESSES, ids=lambda parts: ",".join(name for name, _, _ in parts))
def test_the_kernels_are_right_in_the_interpreter(parts, tmp_path):
    run_parts(ROOT, tmp_path / "report.xml", parts)


def test_every_file_that_can_be_interpreted_is():
    able = {path.stem for path in (ROOT / "tests/gpu").glob("test_*.py") if "TRITON_INTERPRET" in path.read_text()}
    assert able == {f"test_{name}" for parts in PROCESSES for name, _, _ in parts}


GPU = "import pytest\npytestmark = pytest.mark.gpu\n"
BROKEN = {  # a file of tests, and how many of them are expected to pass
    "a test fails": (GPU + "def test_a(): pass\ndef test_b(): assert False\n", 2),
    "all are skipped": (GPU + "@pytest.mark.skip\ndef test_a(): pass\n", 1),
    "one is skipped": (GPU + "def test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n", 2),
    "one is missing": (GPU + "def test_a(): pass\n", 2),
    "none is marked": ("def test_a(): pass\n", 1),
    "cannot be imported": (GPU + "import nowhere_to_be_found\ndef test_a(): pass\n", 1),
    "no such file": ("", 1),
}


def run_file(folder: Path, text: str, expected: int) -> None:
    """`run_parts` of a file of this text; of none where there is no text."""
    (folder / "tests/gpu").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    if text:
        (folder / "tests/gpu/test_part.py").write_text(text)
    run_parts(folder, folder / "report.xml", [("part", "", expected)])


@pytest.mark.parametrize("case", BROKEN)
def test_a_part_that_does_not_pass_whole_fails(case, tmp_path):
    with pytest.raises(AssertionError):
        run_file(tmp_path, *BROKEN[case])


def test_a_part_that_passes_whole_passes(tmp_path):
    run_file(tmp_path, GPU + "def test_a(): pass\ndef test_b(): pass\n", 2)
