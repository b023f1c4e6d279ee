"""Configurations of other trainers become recipes that load."""

import json
import re

import pytest
import yaml

from flowcorr.cli import main
from flowcorr.config import find_recipe, recipe_names
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from tests.translate.configs import FACTORY, GRPO, OMNI, RESOLVED, factory_yaml, loaded, omni_yaml


def written(tmp_path, text, name="some.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def of_wandb(values):
    """The `config.yaml` that W&B keeps of a run."""
    return yaml.safe_dump(
        {"wandb_version": 1, "_wandb": {"value": {"t": {}}}}
        | {name: {"desc": None, "value": part} for name, part in values.items()},
        sort_keys=False,
    )


def test_what_hydra_saves_and_what_it_prints_are_one_recipe(omni, tmp_path):
    """Saved values refer to each other; printed ones stand between other output."""
    found, text = omni()
    assert "oc.select" in omni_yaml()
    assert found.actor.loss_mode == "flow_grpo"
    printed = f"+ python3 -m verl_omni.trainer.main_diffusion\nLogging to a.log\n{omni_yaml()}done\n"
    again = translate(written(tmp_path, printed, "resolved.yaml"))
    assert again == text


@pytest.mark.parametrize(
    ("values", "gpus"), [(RESOLVED, None), ({**GRPO, "script": "train_sd3.py"}, 4), (FACTORY, None)]
)
def test_what_wandb_keeps_is_the_same_recipe(tmp_path, values, gpus):
    plain = written(tmp_path, json.dumps(values), "plain.json")
    kept = written(tmp_path, of_wandb(values), "config.yaml")
    assert loaded(tmp_path, translate(kept, gpus=gpus)) == loaded(tmp_path, translate(plain, gpus=gpus))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello: world", r"verl-omni, flow_grpo or Flow-Factory \(it has: hello\)"),
        ("", "sections of keys"),
        ("a: &a [*a]", "not valid YAML: .* 50 levels"),
        (
            "actor_rollout_ref: {model: {path: deepseek-llm-7b-chat}, rollout: {n: 5, name: vllm}}",
            r"verl-omni, .* actor_rollout_ref\.model\.lora_rank, ",
        ),
        (
            omni_yaml(f"{OMNI}rollout.n=${{oc.env:N}}"),
            r"^actor_rollout_ref\.rollout\.n=.*oc.env:N} .*\.n=VALUE ",
        ),
        (
            omni_yaml(f"{OMNI}rollout.name='???'"),
            r"^actor_rollout_ref\.rollout\.name=\?\?\? .*\.name=VALUE ",
        ),
        ("trainer: {seed: 1}\nmodel: {path: a/sd3}", "flowcorr train takes it"),
        (
            "model: {model_name_or_path: a/sd3}\ntrain: {group_size: 24}",
            r"Flow-Factory, .* model\.model_type, train\.trainer_type",
        ),
    ],
)
def test_a_file_of_something_else_is_never_filled_with_defaults(tmp_path, text, named):
    with pytest.raises(ConfigError, match=rf"{named}.*some\.yaml "):
        translate(written(tmp_path, text))


def test_a_key_that_others_refer_to_is_missed_by_its_own_name(tmp_path):
    values = yaml.safe_load(omni_yaml())
    del values["actor_rollout_ref"]["rollout"]["pipeline"]["width"]
    with pytest.raises(ConfigError, match=r"not hold actor_rollout_ref\.rollout\.pipeline\.width, "):
        translate(written(tmp_path, yaml.safe_dump(values)))


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        (
            "run.sh",
            "python3 -m verl_omni.trainer.main_diffusion data.seed=1 $@",
            r"script .*: bash .*run\.sh --cfg job --resolve > resolved\.yaml",
        ),
        ("run.sh", "bash other.sh data.seed=1", r"starts no trainer .*run\.sh "),
        ("grpo.py", "def sd3():\n    raise SystemExit", r"flow_grpo is code, .* NAME .* sd3 \(.*grpo\.py "),
    ],
)
def test_what_only_a_program_could_resolve_is_refused_with_the_line_that_writes_it(
    tmp_path, name, text, named
):
    with pytest.raises(ConfigError, match=named):
        translate(written(tmp_path, text, name))


def test_no_variable_of_the_environment_reaches_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "read from the environment")
    for text in ("${oc.env:HOME}", "x/${oc.env:HOME}", "$HOME"):
        values = {**GRPO, "dataset": text}
        with pytest.raises(ConfigError, match=f"^dataset={re.escape(text)} .* dataset=VALUE "):
            translate(written(tmp_path, json.dumps(values), "a.json"), gpus=4)


def test_overrides_are_for_every_source_and_gpus_for_one(grpo, omni_file, tmp_path):
    found = loaded(tmp_path, translate(grpo, ["sample.num_steps=12", "train.beta=0"], gpus=2))
    assert (found.sampling.num_inference_steps, found.actor.kl_coef) == (12, 0)
    assert found.rollout.prompts_per_step == 8
    with pytest.raises(ConfigError, match="^gpus=0 .* 1 "):
        translate(grpo, gpus=0)
    with pytest.raises(ConfigError, match="^--gpus 2 .* flow_grpo;"):
        translate(omni_file, gpus=2)


def test_an_override_may_be_of_a_whole_section(omni_file, tmp_path):
    found = loaded(
        tmp_path, translate(omni_file, [f"{OMNI}rollout.algo={{noise_level: 0.1, sde_window_size: 4}}"])
    )
    assert (found.sampling.noise_level, found.sampling.sde_window_size) == (0.1, 4)
    found = loaded(tmp_path, translate(written(tmp_path, factory_yaml()), ["rewards=[{reward_model: ocr}]"]))
    assert [term.name for term in found.reward.terms] == ["ocr"]


@pytest.mark.parametrize(
    "override",
    [f"{OMNI}rollout.nn=4", "unheard.of=1", "critic={lr: 1}", "unheard.api_key=hidden"],
)
def test_an_override_without_a_line_is_a_warning_without_its_secret(omni_file, override):
    key = override.partition("=")[0]
    with pytest.warns(UserWarning, match=rf" follows from {re.escape(key)}\b(?!.*hidden).*=.*;"):
        translate(omni_file, [override])


def test_a_recipe_that_would_not_load_is_refused(grpo):
    with pytest.raises(ConfigError, match=r"^the recipe .*: sampling\.height=0 "):
        translate(grpo, ["resolution=0"], gpus=4)


@pytest.mark.parametrize("name", ["", "n" * 5000, "/", "a/b.py:get"])
def test_a_source_that_is_not_there(name):
    with pytest.raises(ConfigError, match=rf"such file; .*\({name} "):
        translate(name)


def test_every_shipped_recipe_is_a_recipe_already():
    for name in recipe_names():
        path = str(find_recipe(name))
        with pytest.raises(ConfigError, match=rf"flowcorr train .*\({re.escape(path)} "):
            translate(path)


@pytest.mark.filterwarnings("default:no line of the recipe follows")
def test_the_command_shows_its_warnings(omni_file, capsys):
    assert main(["translate", omni_file, f"{OMNI}rollout.nn=4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        f"flowcorr: warning: no line of the recipe follows from {OMNI}rollout.nn=4; check"
    )
    assert captured.err.count("\n") == 1
    assert captured.out.startswith("# Translated")


def test_the_command(grpo, omni_file, tmp_path, capsys):
    assert main(["translate", grpo, "--gpus", "4"]) == 0
    assert capsys.readouterr().out.startswith(
        "# Translated by flowcorr translate from general_ocr_sd3.json, as scripts"
    )
    assert main(["translate", omni_file, "--all"]) == 0
    assert "#   trainer.project_name=flow_grpo\n" in capsys.readouterr().out
    for source, words, message in (
        (str(tmp_path / "none.sh"), [], "no such file"),
        (omni_file, [f"{OMNI}rollout.name=unheard_of"], "rollout.name='unheard_of' is unknown"),
        (
            omni_file,
            ["reward.custom_reward_function.path=a/own.py", f"{OMNI}rollout.pipeline.height=513"],
            "height=513",
        ),
    ):
        assert main(["translate", source, *words]) == 2
        assert message in capsys.readouterr().err
