"""All configurations of other trainers' source trees: each becomes a recipe that loads, or is refused with a reason.

VERL_OMNI=PATH FLOW_GRPO=PATH FLOW_FACTORY=PATH python -m pytest -s -m "verl_omni or real_loops" \
    tests/integrations/test_translate.py

Scripts of verl-omni run up to Hydra, which prints their configuration, so the first test needs its environment; the
second needs ml_collections.
"""

import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

from flowcorr import config
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from flowcorr.translate.resolved import read_sections
from flowcorr.translate.table import set_values

GPUS = (8, 24, 1)
CHOSEN = re.compile(
    r"(reward\.reward_functions|reward\.custom_reward_function\.reward_kwargs|rewards|eval_rewards|reward_fn)\."
)
"""Sections with names that the user chooses, which a recipe names as a whole."""


def root_of(name):
    if name not in os.environ:
        pytest.fail(f"this test needs the path of a source tree in {name}")
    return Path(os.environ[name])


def outcomes(sources, tmp_path):
    """Translate each file, with one of the numbers of GPUs: those that load, and the reasons of the others."""
    recipes, reasons = [], Counter()
    for path, counts in sources:
        for gpus in counts:
            try:
                text = translate(str(path), gpus=gpus, all_keys=True)
                break
            except ConfigError as error:
                reason = str(error).replace(str(path), "").rpartition(" (")[0]
        else:
            reasons[reason] += 1
            continue
        keys = [key for key, _ in set_values(read_sections(path.read_text()))]
        assert [key for key in keys if key not in text and not CHOSEN.match(key)] == [], path
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bfloat16 weights without an adapter, as some of them train
            assert config.load(recipe).rollout.n >= 2
        recipes.append(path)
    print(f"\n{len(recipes)} of {len(sources)} translated; refused:")
    print(*(f"  {count}: {reason}" for reason, count in reasons.most_common()), sep="\n")
    return recipes, reasons


def assert_reasons(reasons, known):
    assert [reason for reason in reasons if not any(text in reason for text in known)] == []


@pytest.mark.verl_omni
def test_every_script_of_verl_omni(tmp_path):
    root, sources = root_of("VERL_OMNI"), []
    (tmp_path / "sitecustomize.py").write_text("import verl_omni_on_cpu  # in each Python of the scripts\n")
    environment = {
        "HOME": str(tmp_path),
        # They call `python3`.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path)),
    }
    for script in sorted(root.rglob("*.sh")):
        if "-m verl_omni.trainer.main_diffusion" not in script.read_text():
            continue
        found = subprocess.run(
            ["bash", script, "--cfg", "job", "--resolve"],
            check=False,
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, **environment},
            timeout=300,
        )
        if "actor_rollout_ref:" in found.stdout:  # some end before, without a GPU or the path of a teacher
            resolved = tmp_path / f"{len(sources)}_{script.stem}.yaml"
            resolved.write_text(found.stdout)
            sources.append((resolved, (None,)))
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 20
    assert_reasons(
        reasons, ("has no equivalent here", "makes videos", "edits images", "names no model of the")
    )


@pytest.mark.real_loops
def test_every_configuration_of_flow_grpo(tmp_path):
    root, sources = root_of("FLOW_GRPO"), []
    for name in re.findall(r"^def (\w+)\(\)", (root / "config/grpo.py").read_text(), re.MULTILINE):
        code = f"import runpy; print(runpy.run_path('config/grpo.py')['{name}']().to_json_best_effort())"
        made = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
        path = tmp_path / f"{name}.json"
        path.write_bytes(made.stdout)
        sources.append((path, GPUS))
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 6
    known = (
        "has no equivalent here",
        "names no model of the",
        "no other to be compared with",
        "no multiple of",
    )
    assert_reasons(reasons, known)


@pytest.mark.real_loops
def test_every_recipe_of_flow_factory(tmp_path):
    sources = [(path, (None,)) for path in sorted(root_of("FLOW_FACTORY").glob("examples/**/*.yaml"))]
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 16
    assert_reasons(reasons, ("has no equivalent here", "belongs to no family that flowcorr knows"))
