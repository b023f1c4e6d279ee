"""The floors of the package: files import from lower floors, or within their own package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flowcorr

PACKAGE = Path(flowcorr.__file__).parent
FLOORS = {
    "errors": 0, "imports": 0, "devices": 0, "distributed": 0, "records": 0, "metrics": 0,
    "sde": 1, "correction": 1, "losses": 1, "advantages": 1,
    "config": 2,
    "algorithm": 3,
    "models": 4, "rewards": 4, "data": 4, "words": 4, "trackers": 4, "lora": 4,
    "ray_cluster": 4, "ray_workers": 4, "fsdp": 4,
    "actor": 5, "rollout": 5, "tiny": 5,
    "trainer": 6,
    "diagnostics": 7, "integrations": 7,
    "cli": 8, "__main__": 9,
}  # fmt: skip
HEAVY = {"diffusers", "transformers", "peft", "vllm_omni", "accelerate", "ray"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path) -> set[str]:
    """Dotted names of all modules that the file imports, at its top and inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "flowcorr":
            names |= {f"flowcorr.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_lower_floors(path):
    part = _part(path)
    used = {name.split(".")[1] for name in _imports(path) if name.startswith("flowcorr.")} - {part}
    assert {name: FLOORS[name] for name in used if FLOORS[name] > FLOORS[part]} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_floors_do_not_import_model_libraries(path):
    if FLOORS[_part(path)] < FLOORS["models"]:
        assert {name.split(".")[0] for name in _imports(path)} & HEAVY == set()


def test_packages_of_one_floor_do_not_import_each_other_in_circles():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        used = {name.split(".")[1] for name in _imports(path) if name.startswith("flowcorr.")}
        graph.setdefault(_part(path), set()).update(used - {_part(path)})

    def reachable(part: str, seen: frozenset[str] = frozenset()) -> set[str]:
        return {part}.union(
            *(reachable(name, seen | {part}) for name in graph.get(part, ()) if name not in seen)
        )

    circles = {part for part, used in graph.items() if any(part in reachable(name) for name in used)}
    assert circles == set()


@pytest.mark.parametrize(
    "statement", ["import flowcorr", "import flowcorr.config", "from flowcorr.cli import main"]
)
def test_import_is_cheap(statement):
    code = f"import sys; {statement}; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert _run(code) == "[]"


def test_bare_import_and_help_do_not_import_torch():
    code = (
        "import contextlib, io, sys, flowcorr\n"
        "from flowcorr.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['--help'])\n"
        "print('torch' in sys.modules)"
    )
    assert _run(code) == "False"


def test_public_names_resolve():
    for name in flowcorr.__all__:
        assert getattr(flowcorr, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        flowcorr.nonsense  # noqa: B018


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout.strip()
