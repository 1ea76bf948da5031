"""The house rules that a reader would otherwise have to check by hand."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outrider"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may know whom. Arrows point one way.
KNOWS: dict[str, set[str]] = {
    "core": set(),
    "checkpoints": {"core"},
    "kernels": {"core"},
    "kvcache": {"core"},
    "models": {"checkpoints", "core"},
    "verify": {"core", "kernels"},
    "grammar": {"core"},
    "runners": {"core", "kernels", "kvcache", "models"},
    "loading": {"checkpoints", "core", "models", "runners"},
    "drafters": {"core", "models", "runners", "verify"},
    "engine": {"core", "drafters", "runners", "verify"},
    "llm": {"core", "drafters", "engine", "grammar", "loading", "verify"},
    "testing": {"checkpoints", "core", "drafters", "kvcache", "models", "runners"},
    "bench": {"core", "drafters", "engine", "llm", "loading", "models", "runners", "testing"},
    "server": {"core", "engine", "grammar", "llm", "models"},
    "cli": {"bench", "checkpoints", "core", "drafters", "engine", "grammar", "llm", "loading", "server", "testing"},
}
LIGHT = {"torch", "numpy", "safetensors", "tokenizers", "transformers", "jinja2", "outrider"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [(name, id(node) in top) for name in names if name]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    part = part_of(path)
    if part.startswith("__"):
        return
    for module, _ in imports(path):
        if module.startswith("outrider."):
            other = module.split(".")[1]
            assert other == part or other in KNOWS[part], f"{part} must not know {other}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if part_of(p) not in ("cli", "server")], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_the_core_imports_only_what_a_bare_gpu_image_has(path):
    for module, top in imports(path):
        name = module.split(".")[0]
        if name == "triton" and path.name.startswith("triton_"):
            continue  # imported only where there is a CUDA device, see runners/native.py
        assert not top or name in LIGHT or name in sys.stdlib_module_names, f"import {name} where it is used"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_runs_code_from_a_file_or_a_request(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "os.system"}, name
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                assert not (keyword.arg == "trust_remote_code" and value != "False"), path
                assert not (keyword.arg == "shell" and value == "True"), path
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "pickle" not in ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_checks_that_must_hold_are_not_asserts(path):
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not found, "asserts vanish under python -O: raise instead"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_name_becomes_a_drafter_in_the_registry_alone(path):
    text = path.read_text()
    assert "isinstance(drafter" not in text or path.name == "llm.py"
    assert "method ==" not in text or path.name == "speculative_config.py"


def test_the_package_imports_without_loading_torch():
    code = "import sys, outrider; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engine_imports_on_a_bare_image():
    """With everything but the core dependencies hidden, the engine still imports."""
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"gguf", "typer", "rich", "fastapi", "pydantic", "hypothesis"}:
            raise ImportError(name)
sys.meta_path.insert(0, Hidden())
import outrider.llm, outrider.testing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
