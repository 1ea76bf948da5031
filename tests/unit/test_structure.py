"""The house rules that a reader would otherwise have to check by hand."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outrider"
FILES = sorted(PACKAGE.rglob("*.py"))

# Which room imports which, from the ground up. Arrows point one way.
KNOWS: dict[str, set[str]] = {
    "core": set(),
    "checkpoints": {"core"},
    "kernels": {"core"},
    "kvcache": {"core"},
    "report": set(),
    "grammar": {"core"},
    "native": {"checkpoints", "core"},
    "models": {"checkpoints", "core", "native"},
    "verify": {"core", "kernels"},
    "runners": {"core", "kernels", "kvcache", "models", "native"},
    "loading": {"checkpoints", "core", "models", "runners"},
    "control": {"core", "runners"},
    "drafters": {"core", "models", "runners", "verify"},
    "testing": {"core", "drafters", "kvcache", "models", "runners"},
    "engine": {"control", "core", "drafters", "runners", "verify"},
    "llm": {"checkpoints", "core", "drafters", "engine", "grammar", "loading", "models", "verify"},
    "bench": {
        "checkpoints",
        "control",
        "core",
        "drafters",
        "engine",
        "llm",
        "loading",
        "models",
        "prove",
        "report",
        "runners",
        "testing",
    },
    "train": {"checkpoints", "core", "drafters", "engine", "kernels", "llm", "loading", "models", "report"},
    "server": {"core", "engine", "grammar", "llm"},
    "remote": {"core", "engine", "server"},
    "async_llm": {"core", "engine", "llm", "loading", "models", "server"},
    "plan": {"checkpoints", "core", "drafters", "kernels", "loading", "models", "native", "report", "runners"},
    "prove": {"core", "drafters", "engine", "llm", "report", "runners", "train", "verify"},
    "check": {"checkpoints", "core", "drafters", "llm", "models", "plan", "report"},
    "advise": {"bench", "core", "drafters", "engine", "llm", "models", "report", "train"},
    "fleet": {"bench", "core", "engine", "llm", "loading", "report"},
    "cli": {
        "advise",
        "bench",
        "check",
        "checkpoints",
        "core",
        "drafters",
        "engine",
        "fleet",
        "grammar",
        "llm",
        "loading",
        "plan",
        "prove",
        "remote",
        "report",
        "server",
        "testing",
        "train",
    },
}
# Files that ask foreign objects for what they have, which differs between versions or platforms.
FOREIGN = {
    "bench/profile.py": "the profiler's events",
    "cli/usage.py": "errors of the command line's parser",
    "drafters/registry.py": "configuration classes of other packages, when they are imported",
    "engine/arguments.py": "arrays of any library",
    "grammar/vocabulary.py": "tokenizers of other libraries",
    "models/tokenizer.py": "tokenizers of Transformers",
    "runners/fallback.py": "configurations of Transformers",
    "runners/paged_model.py": "the platform's mmap",
    "server/http/request_middleware.py": "routes of the web framework",
    "server/ops/logs.py": "log records",
    "server/service.py": "requests of the web framework",
}
LIGHT = {"torch", "numpy", "safetensors", "tokenizers", "transformers", "jinja2", "outrider"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level) of every import in a file."""
    tree = tree_of(path)
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [(name, id(node) in top) for name in names if name]
    return found


def modules_imported(path: Path) -> set[str]:
    """The package's own modules that a file imports anywhere, also only for its types."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


MODULES = {".".join(("outrider", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in FILES}


def test_each_room_knows_what_is_listed_and_nothing_else():
    """Neither an arrow that is not allowed, nor a permission that nobody needs."""
    found: dict[str, set[str]] = {room: set() for room in KNOWS}
    for path in FILES:
        room = part_of(path)
        if not room.startswith("__"):
            rooms = {name.split(".")[1] for name, _ in imports(path) if name.startswith("outrider.")}
            found[room] |= rooms - {room}
    assert found == KNOWS


def test_no_room_is_above_itself():
    list(TopologicalSorter(KNOWS).static_order())


def test_no_files_import_each_other_in_a_circle():
    list(TopologicalSorter({name: modules_imported(path) for name, path in MODULES.items()}).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_capabilities_are_declared_not_probed(path):
    """No hasattr, and no getattr with a default, on objects of our own: see drafters.base.Traits."""
    if str(path.relative_to(PACKAGE)) in FOREIGN:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            probes = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2)
            assert not probes, f"line {node.lineno}: {ast.unparse(node)}"


def test_only_files_that_probe_foreign_objects_are_excused():
    for name in FOREIGN:
        text = (PACKAGE / name).read_text()
        assert "hasattr(" in text or "getattr(" in text, name


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if part_of(p) not in ("cli", "remote", "server")],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_the_core_imports_only_what_a_bare_gpu_image_has(path):
    for module, top in imports(path):
        name = module.split(".")[0]
        if name == "triton" and path.name.startswith("triton_"):
            continue  # imported only where there is a CUDA device, see runners/native.py
        assert not top or name in LIGHT or name in sys.stdlib_module_names, f"import {name} where it is used"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_runs_code_from_a_file_or_a_request(path):
    for node in ast.walk(tree_of(path)):
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
    found = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
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
