"""All configurations of other trainers' source trees: each becomes a recipe that loads, or is refused with a reason.

VERL_OMNI=PATH FLOW_GRPO=PATH FLOW_FACTORY=PATH python -m pytest -s -m "verl_omni or real_loops" \
    tests/integrations/test_translate.py
"""

import os
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import yaml

from flowcorr import config
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from flowcorr.translate.hydra import flat
from flowcorr.translate.python_config import read_config, read_functions

WORD = re.compile(r"""^\s+['"]?\+{0,2}([a-z_]\w*(?:\.\w+)+)=""", re.MULTILINE)
"""The key of an override that has a line of its own."""
GPUS = (8, 24, 1)  # for files that do not contain a number


def root_of(name):
    if name not in os.environ:
        pytest.fail(f"this test needs the path of a source tree in {name}")
    return Path(os.environ[name])


def is_named(key, text):
    """Whether a recipe names a key; one of a reward function may be named by its section."""
    section = re.match(
        r"(reward\.reward_functions|reward\.custom_reward_function\.reward_kwargs)\.", f"{key}."
    )
    return key in text or (section is not None and section[1] in text)


def outcomes(sources, tmp_path):
    """Translate each source, given with its keys: the recipes that load, and the reasons of the others."""
    recipes, reasons = [], Counter()
    for source, keys, counts in sources:
        for gpus in counts:
            try:
                text = translate(source, gpus=gpus)
                break
            except ConfigError as error:
                reason = str(error).replace(source, "").rpartition(" (")[0]
        else:
            reasons[reason] += 1
            continue
        assert [key for key in keys if not is_named(key, text)] == [], source
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bfloat16 weights without an adapter, as some of them train
            assert config.load(recipe).rollout.n >= 2
        recipes.append(source)
    print(f"\n{len(recipes)} of {len(sources)} translated; refused:")
    print(*(f"  {count}: {reason}" for reason, count in reasons.most_common()), sep="\n")
    return recipes, reasons


def assert_reasons(reasons, known):
    assert [reason for reason in reasons if not any(text in reason for text in known)] == []


@pytest.mark.verl_omni
def test_every_script_of_verl_omni(tmp_path):
    scripts = sorted(root_of("VERL_OMNI").rglob("*.sh"))
    texts = {path: path.read_text() for path in scripts if "-m verl_omni.trainer" in path.read_text()}
    sources = [(str(path), WORD.findall(text), (None,)) for path, text in texts.items()]
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 20
    assert_reasons(
        reasons,
        (
            *("has no equivalent here", "makes videos", "trains no diffusion model", "names no model of the"),
            *("it starts verl.trainer.main_ppo of verl", "chooses other defaults", "only a shell could tell"),
            "leave the one to translate",
        ),
    )


@pytest.mark.real_loops
def test_every_configuration_of_flow_grpo(tmp_path):
    files = [path for path in sorted(root_of("FLOW_GRPO").glob("config/*.py")) if path.name != "base.py"]
    sources = []
    for path in files:
        for name in read_functions(path):
            keys = dict(flat(read_config(path, name)[0], keep=("reward_fn",)))
            sources.append((f"{path}:{name}", keys, (None, *GPUS)))
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 6
    assert_reasons(
        reasons, ("has no equivalent here", "names no model of the", "no other to be compared with")
    )


@pytest.mark.real_loops
def test_every_recipe_of_flow_factory(tmp_path):
    sources = []
    for path in sorted(root_of("FLOW_FACTORY").glob("examples/**/*.yaml")):
        given = yaml.safe_load(path.read_text())
        sources.append((str(path), dict(flat(given, keep=("rewards", "eval_rewards"))), (None,)))
    recipes, reasons = outcomes(sources, tmp_path)
    assert len(recipes) >= 16
    assert_reasons(reasons, ("has no equivalent here", "belongs to no family that flowcorr knows"))
