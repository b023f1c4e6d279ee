"""The floors of the package: files import from lower floors, or within their own package."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import flowcorr

PACKAGE = Path(flowcorr.__file__).parent
FLOORS = {
    "errors": 0, "imports": 0, "devices": 0, "distributed": 0, "records": 0, "metrics": 0, "private": 0,
    "processes": 0, "device_names": 0, "references": 0, "texts": 0, "hub": 0,
    "sde": 1, "correction": 1, "losses": 1, "advantages": 1, "dumps": 1,
    "config": 2,
    "algorithm": 3, "translate": 3,
    "models": 4, "rewards": 4, "data": 4, "words": 4, "trackers": 4, "lora": 4,
    "actor": 5, "rollout": 5, "workers": 5,
    "questions": 6,
    "health": 7,
    "trainer": 8,
    "instruments": 9, "integrations": 9,
    "cli": 10, "__main__": 11,
}  # fmt: skip
LONGEST_FILE = 450
MODEL_LIBRARIES = {"diffusers", "transformers", "peft", "vllm_omni", "ray"}
SLOW_TO_IMPORT = MODEL_LIBRARIES | {"accelerate"}


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
del MODULES["flowcorr"]  # it imports its public names when they are asked for


def _room(module: str) -> str:
    return module.split(".")[1]


@cache
def _imports(path: Path) -> set[str]:
    """All modules that a file imports: at its top, inside functions, and under `TYPE_CHECKING`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            members = {f"{package}.{alias.name}" for alias in node.names}
            names |= members & MODULES.keys()
            if members - MODULES.keys():
                names.add(package)
    return names


def _own_imports(module: str) -> set[str]:
    return _imports(MODULES[module]) & MODULES.keys()


def test_no_file_is_too_long_to_read():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def test_imports_come_from_lower_floors():
    assert [
        (module, name)
        for module in MODULES
        for name in _own_imports(module)
        if FLOORS[_room(name)] > FLOORS[_room(module)]
    ] == []


def test_lower_floors_do_not_import_model_libraries():
    assert [
        (module, name)
        for module in MODULES
        for name in _imports(MODULES[module])
        if FLOORS[_room(module)] < FLOORS["models"] and name.split(".")[0] in MODEL_LIBRARIES
    ] == []


def test_no_modules_import_each_other_in_a_circle():
    assert _circle({module: _own_imports(module) - {module} for module in MODULES}) is None


def test_no_rooms_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {_room(module): set() for module in MODULES}
    for module in MODULES:
        graph[_room(module)] |= {_room(name) for name in _own_imports(module)} - {_room(module)}
    assert _circle(graph) is None


def _circle(graph: dict[str, set[str]]) -> list[str] | None:
    """One circle of a graph of imports, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def _compares_a_loss_mode(path: Path) -> bool:
    """Whether the file holds `loss_mode` against names of losses, which a row of `LOSSES` should answer."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = any(getattr(side, "attr", getattr(side, "id", "")) == "loss_mode" for side in sides)
            if named and any(
                isinstance(side, ast.Constant | ast.Tuple | ast.Set | ast.List) for side in sides
            ):
                return True
    return False


def test_only_the_table_of_losses_knows_them_by_name():
    assert [
        name for name, path in MODULES.items() if _room(name) != "losses" and _compares_a_loss_mode(path)
    ] == []


@pytest.mark.parametrize(
    "statement", ["import flowcorr", "import flowcorr.config", "from flowcorr.cli import main"]
)
def test_import_is_cheap(statement):
    code = f"import sys; {statement}; print(sorted({SLOW_TO_IMPORT!r} & set(sys.modules)))"
    assert _run(code) == "[]"


ANSWERED_WITHOUT_TORCH = {
    "--help": 0,
    "presets": 0,
    "config tiny_ocr_lora_bypass actor.lr=1e-4": 0,
    "config qwen_image_edit_plus_lora": 0,
    "config flux_dev_pickscore_lora": 0,
    "config wan_ocr_lora sampling.num_frames=9": 0,
    "config wan_ocr_lora sampling.num_frames=6": 2,
    "explain kl clip_noise_fraction clipped": 0,
    "explain ESS decoupled_seq_is actor.clip_ratio": 0,
    "explain lora wrong_prompt one_step jump worker reward_hacking step_z": 0,
    "explain Loss Mode Engine RolloutEngine Metric Rule Reward": 0,
    "explain kll": 2,
    "completion bash": 0,
    "nonsense": 2,
    "train tiny_ocr_lora --lrr 1": 2,
    "train tiny_ocr_lora actor.lrr=1": 2,
    "config tiny_ocr_lora actor.lr=fast": 2,
    "doctor tiny_ocr_lra": 2,
    "doctor . --model tiny_ocr_lra.yaml": 2,
    "audit tiny_ocr_lora algorithm.rollout_correction.rollout_rs=token_k4": 2,
    "audit . --batches 2": 2,
    "plan tiny_ocr_lora actor.loss_mode=flow_gripo": 2,
    "plan tiny_ocr_lora sampling.height=17": 2,
    "train tiny_ocr_lora reward.terms=[{name:orc}]": 2,
    "eval nowhere": 2,
    "translate nowhere": 2,
}
"""Command lines that compute nothing, and typos, with their exit codes."""


def test_what_computes_nothing_is_answered_without_torch():
    code = (
        "import contextlib, io, sys, flowcorr\n"
        "from flowcorr.cli import main\n"
        "answers = {}\n"
        f"for line in {[*ANSWERED_WITHOUT_TORCH]!r}:\n"
        "    output = io.StringIO()\n"
        "    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):\n"
        "        try:\n"
        "            code = main(line.split())\n"
        "        except SystemExit as stop:\n"
        "            code = stop.code\n"
        "    answers[line] = 'imports torch' if 'torch' in sys.modules else code\n"
        "print(answers)"
    )
    assert ast.literal_eval(_run(code)) == ANSWERED_WITHOUT_TORCH


def test_public_names_resolve():
    for name in flowcorr.__all__:
        assert getattr(flowcorr, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        flowcorr.nonsense  # noqa: B018


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout.strip()
