"""The integration inside the real verl-omni. Its training side runs from a source tree, on one CPU process:

tests/integrations/install.sh VENV PATH
VERL_OMNI=PATH VENV/bin/python -m pytest -m verl_omni tests/integrations

`_update_actor` and `_compute_old_log_prob` are the methods of verl-omni's trainer that an integration overrides.
"""

import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flowcorr import sde
from flowcorr.cli import main
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from flowcorr.integrations.verl_omni import LOSSES, correct_batch, register_losses, step_loss
from flowcorr.models import resolve_path
from tests.examples.scripts import load

pytestmark = [pytest.mark.verl_omni, pytest.mark.filterwarnings("ignore")]

NEED_MEANS = ("grpo_guard", "flow_dppo")
LOSS_MODE = "actor_rollout_ref__actor__diffusion_loss__loss_mode"
BYPASS = {"algorithm__rollout_correction__bypass_mode": "true"}
BAND = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=(0.9999, 1.0001))


def module_of_the_page():
    """The module `my_run` that users paste."""
    page = (Path(__file__).parents[2] / "flowcorr" / "correction" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# my_run.py.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture(autouse=True)
def registry(omni, monkeypatch):
    """verl-omni's losses, its own again after each test."""
    from verl_omni.trainer.diffusion import diffusion_algos

    own = dict(diffusion_algos.DIFFUSION_LOSS_REGISTRY)
    yield diffusion_algos.DIFFUSION_LOSS_REGISTRY
    diffusion_algos.DIFFUSION_LOSS_REGISTRY.update(own)


@pytest.fixture(scope="module")
def rollout(omni):
    """A batch as the trainers get it, sampled by a bfloat16 copy of the model."""
    from diffusers import StableDiffusion3Pipeline
    from verl import DataProto

    size = omni.GROUPS * omni.MEMBERS
    pipeline = StableDiffusion3Pipeline.from_pretrained(resolve_path("tiny_ocr"))
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            ["ab", "cat", "dog", "wxyz"], None, None, do_classifier_free_guidance=False, max_sequence_length=8
        )
    embeds, pooled = (rows.repeat_interleave(omni.MEMBERS, 0) for rows in (embeds, pooled))
    engine = copy.deepcopy(pipeline.transformer).bfloat16()
    pipeline.scheduler.set_timesteps(10)
    sigmas, timesteps = pipeline.scheduler.sigmas, pipeline.scheduler.timesteps
    draw = torch.Generator().manual_seed(0)
    latents = [torch.randn(size, 4, 8, 16, generator=draw)]
    log_probs = []
    for step in range(2):
        sigma, sigma_next = (sigmas[place].expand(size) for place in (step, step + 1))
        with torch.no_grad():
            velocity = engine(
                latents[-1].bfloat16(),
                embeds.bfloat16(),
                pooled.bfloat16(),
                timesteps[step].expand(size),
                return_dict=False,
            )[0].float()
        transition = sde.transition(
            "sde", latents[-1], velocity, sigma, sigma_next, 0.7, sigma_max=sigmas[1].item()
        )
        latents.append(sde.sample(transition, torch.randn(latents[-1].shape, generator=draw)))
        log_probs.append(sde.log_prob(latents[-1], transition))
    tensors = {
        "prompts": torch.zeros(size, 4, dtype=torch.long),
        "responses": torch.zeros(size, 3, 32, 64, dtype=torch.uint8),
        "all_latents": torch.stack(latents, 1),
        "all_timesteps": timesteps[:2].expand(size, 2).clone(),
        "rollout_log_probs": torch.stack(log_probs, 1),
        "prompt_embeds": embeds,
        "prompt_embeds_mask": torch.ones(embeds.shape[:2], dtype=torch.int32),
        "pooled_prompt_embeds": pooled,
        "rm_scores": -latents[-1].square().mean((1, 2, 3))[:, None],
    }
    groups = np.array([f"prompt {place // omni.MEMBERS}" for place in range(size)], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": groups})


@pytest.fixture
def run(omni, rollout, monkeypatch):
    """One step of a trainer class: its metrics, the batch as it was left, and how far each weight moved."""

    def step(cls, **overrides):
        settings = omni.config(**overrides)
        actor = omni.worker(settings)
        before = omni.adapter(actor)
        metrics, batch = omni.step(omni.trainer(cls, settings, actor), copy.deepcopy(rollout), monkeypatch)
        return metrics, batch, {name: value - before[name] for name, value in omni.adapter(actor).items()}

    return step


def trainer_class(mode="Sync", correction=None):
    """verl-omni's trainer, or the subclass of it that the integration's docstring shows."""
    v1 = importlib.import_module("verl_omni.trainer.diffusion.v1")
    base = getattr(v1, f"PolicyGradientDiffusionTrainerV1{mode}")
    return base if correction is None else corrected(base, correction)


def corrected(base, correction):
    class Trainer(base):
        def _update_actor(self, data):
            data, metrics = correct_batch(data, correction)
            output = super()._update_actor(data)
            output.meta_info["metrics"].update(metrics)
            return output

    return Trainer


# How a run is started ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataclass", [False, True])
def test_its_own_section_is_read(omni, rollout, dataclass):
    from verl.utils.config import omega_conf_to_dataclass

    section = omni.config().algorithm.rollout_correction
    data = copy.deepcopy(rollout)
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"] + 1e-3
    batch, metrics = correct_batch(data, omega_conf_to_dataclass(section) if dataclass else section)
    assert torch.equal(batch.batch["rollout_is_weights"], torch.ones_like(data.batch["old_log_probs"]))
    assert metrics["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(1e-3, rel=1e-3)


def test_external_modules_bring_a_trainer_and_the_losses(omni, tmp_path):
    (tmp_path / "my_run.py").write_text(
        f"{module_of_the_page()}\nfrom flowcorr.integrations.verl_omni import register_losses\n\nregister_losses()\n"
    )
    script = (
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "os.environ['VERL_USE_EXTERNAL_MODULES'] = 'my_run'\n"
        "import verl_omni_on_cpu, verl_omni.trainer.main_diffusion_v1\n"
        "from verl_omni.trainer.diffusion.v1 import get_diffusion_trainer_cls\n"
        "from verl_omni.trainer.diffusion.diffusion_algos import DIFFUSION_LOSS_REGISTRY\n"
        "places = {name: type(loss).__module__ for name, loss in DIFFUSION_LOSS_REGISTRY.items()}\n"
        "print(json.dumps([get_diffusion_trainer_cls('sync').__module__, places]))\n"
    )
    program = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trainer, losses = json.loads(done.stdout.splitlines()[-1])
    assert trainer == "my_run"
    ours = {name for name, module in losses.items() if module == "flowcorr.integrations.verl_omni"}
    assert ours == set(LOSSES)


def test_external_lib_brings_the_losses(omni, registry, tmp_path, monkeypatch):
    from verl.utils.config import omega_conf_to_dataclass

    (tmp_path / "my_losses.py").write_text(
        "from flowcorr.integrations.verl_omni import register_losses\nregister_losses()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = dict(registry)
    omega_conf_to_dataclass(
        omni.config(actor_rollout_ref__model__external_lib="my_losses").actor_rollout_ref.model
    )
    assert {name for name in own if registry[name] is not own[name]} == set(LOSSES)


# Training steps ------------------------------------------------------------------------------------------


def test_recomputed_log_probs_agree_with_the_rollouts(omni, rollout):
    """Its engine in float32 and `flowcorr.sde` after a bfloat16 transformer: the gap is that of the dtype."""
    settings = omni.config()
    trainer = omni.trainer(trainer_class(), settings, omni.worker(settings))
    recomputed = trainer._compute_old_log_prob(copy.deepcopy(rollout)).batch["old_log_probs"]
    gap = (recomputed - rollout.batch["rollout_log_probs"]).abs()
    assert 0 < gap.max() < 5e-3


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_without_weights_is_verl_omnis_own(run, name):
    own_metrics, _, own = run(trainer_class(), **{LOSS_MODE: name})
    register_losses()
    metrics, _, ours = run(trainer_class(), **{LOSS_MODE: name})
    largest = max(value.abs().max().item() for value in own.values())
    assert largest > 0
    for key, value in own.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=0.02 * largest)
    shared = [key for key in own_metrics if key.startswith("actor/") and key in metrics]
    assert {"actor/ppo_kl", "actor/ratio_mean"} <= set(shared)


@pytest.mark.parametrize("mode", ["Sync", "SeparateAsync"])
@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard"])
def test_a_decoupled_step(run, mode, name):
    register_losses()
    trainer = trainer_class(mode, RolloutCorrectionConfig.seq_is())
    metrics, batch, moved = run(trainer, **{LOSS_MODE: name})
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.01)
    assert batch.batch["rollout_log_probs"].shape == (32, 2)
    assert max(value.abs().max().item() for value in moved.values()) > 0


def test_the_module_of_the_page_corrects_a_step(run):
    names = {}
    exec(compile(module_of_the_page(), "my_run.py", "exec"), names)
    metrics, _, moved = run(names["Trainer"])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.01)
    assert metrics["rollout_corr/rollout_is_std"] > 0
    assert max(value.abs().max().item() for value in moved.values()) > 0


def test_the_older_trainer_has_the_same_hook(omni, rollout):
    from verl_omni.trainer.diffusion import ray_diffusion_trainer as older

    settings = omni.config()
    trainer = omni.trainer(
        corrected(older.PolicyGradientRayTrainer, RolloutCorrectionConfig.seq_is()),
        settings,
        omni.worker(settings),
    )
    data = copy.deepcopy(rollout)
    data = data.union(trainer_class()._compute_old_log_prob(trainer, data))
    data.batch["sample_level_rewards"] = data.batch["rm_scores"].expand(-1, 2)
    data = older.compute_advantage(
        data,
        adv_estimator="flow_grpo",
        norm_adv_by_std_in_grpo=True,
        global_std=True,
        config=settings.algorithm,
    )
    metrics = trainer._update_actor(data).meta_info["metrics"]
    assert {"rollout_corr/rollout_is_mean", "actor/pg_clipfrac"} <= set(metrics)


def test_its_steps_are_dumped_for_a_diagnosis(run, tmp_path, capsys):
    examples = load("dump_log_probs")

    class Trainer(trainer_class()):
        def _update_actor(self, data):
            examples.dump_verl_omni(tmp_path, self.global_steps, data, self.config)
            return super()._update_actor(data)

    run(Trainer)
    for command in ("audit", "report"):
        assert main([command, str(tmp_path)]) == 0
    assert "32 samples of 2 SDE steps, D = 512" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_a_bypass_step_rejects_inside_the_loss(run, name):
    register_losses(BAND)
    trainer = trainer_class(correction=BAND)
    metrics, batch, _ = run(trainer, **{LOSS_MODE: name}, **BYPASS)
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    assert 0 < metrics["actor/rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.parametrize("name", NEED_MEANS)
def test_a_bypass_step_of_a_loss_that_needs_means_is_refused(run, name):
    register_losses(BAND)
    with pytest.raises(ConfigError, match=f"loss_mode={name} .*old_prev_sample_mean"):
        run(trainer_class(), **{LOSS_MODE: name}, **BYPASS)


# Losses and batches --------------------------------------------------------------------------------------


def loss_inputs(name, size=64):
    """Keywords of verl-omni's losses: log-ratios on both sides of the clip range, large advantages, some rejected."""
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(size, generator=draw)
    mean = torch.randn(size, 2, 3, 5, generator=draw)
    inputs = {
        "old_log_prob": old,
        "log_prob": old + 0.002 * torch.randn(size, generator=draw),
        "advantages": 8 * torch.randn(size, generator=draw),
        "rollout_is_weights": torch.rand(size, generator=draw).sub(0.2).clamp(min=0),
    }
    if name in NEED_MEANS:
        inputs |= {
            "old_prev_sample_mean": mean,
            "prev_sample_mean": mean + 0.002 * torch.randn(mean.shape, generator=draw),
            "std_dev_t": torch.full((size, 1, 1, 1), 0.8),
            "sqrt_dt": torch.full((size,), 0.3),
        }
    return inputs


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_verl_omnis_own(omni, registry, name):
    from verl.utils.config import omega_conf_to_dataclass

    settings = omega_conf_to_dataclass(omni.config(**{LOSS_MODE: name}).actor_rollout_ref.actor)
    results = []
    for loss in (registry[name], register_losses() or registry[name]):
        inputs = loss_inputs(name)
        inputs["log_prob"].requires_grad_()
        value, _ = loss.compute_loss(config=settings, **inputs)
        results.append((value.detach(), *torch.autograd.grad(value, inputs["log_prob"])))
    (own, own_gradient), (ours, gradient) = results
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, own_gradient, rtol=1e-4, atol=1e-6)


def test_metrics_of_ranks_merge_where_one_rejects_a_whole_micro_batch(omni):
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.metric import AggregationType, Metric
    from verl.utils.py_functional import append_to_dict

    settings = omega_conf_to_dataclass(omni.config().actor_rollout_ref.actor)

    def rank(*micro_batches):
        gathered = {}
        for weight in micro_batches:
            given = loss_inputs("flow_grpo", len(weight))
            output = {"log_probs": given["log_prob"]}
            data = {
                "old_log_probs": given["old_log_prob"],
                "advantages": given["advantages"],
                "rollout_is_weights": weight,
            }
            _, metrics = step_loss("flow_grpo", config=settings, model_output=output, data=data)
            append_to_dict(gathered, Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
        return gathered

    first, second = rank(torch.ones(2), torch.ones(2)), rank(torch.ones(2), torch.zeros(2))
    assert set(first) == set(second)
    merged = {name: Metric.aggregate_dp([first[name], second[name]]) for name in first}
    assert merged["actor/ratio_mean"] == pytest.approx(1, abs=0.01)


def test_a_data_proto_without_tensors_is_named(omni):
    from verl import DataProto

    with pytest.raises(BatchError, match="the DataProto .*rollout_log_probs"):
        correct_batch(DataProto(batch=None), BAND)
