"""Whether a scheduler takes Euler's steps is asked of the scheduler, whatever its class is called."""

import json
import shutil

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import EMBEDDED, load_family
from flowcorr.models.step_rule import check_step_rule

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def scheduler(name, **config):
    return getattr(diffusers, name)(**config)


class Renamed(FlowMatchEulerDiscreteScheduler):
    """Euler's steps, written in another way."""

    def step(self, model_output, timestep, sample, **options):
        image = sample - self.sigmas[self.step_index or 0] * model_output
        super().step(model_output, timestep, sample)
        after = self.sigmas[self.step_index]
        return (image + after * model_output,)


class OverShoots(FlowMatchEulerDiscreteScheduler):
    """The last step but one is a hundredth too long."""

    def step(self, model_output, timestep, sample, **options):
        arrived = super().step(model_output, timestep, sample)[0]
        if self.step_index == len(self.timesteps) - 1:
            arrived = sample + 1.01 * (arrived - sample)
        return (arrived,)


@pytest.mark.parametrize(
    "config",
    [
        {"shift": 3.0},
        {"use_dynamic_shifting": True},
        {"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.02},
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True, "shift": 12.0},
    ],
)
@pytest.mark.parametrize("kind", [FlowMatchEulerDiscreteScheduler, Renamed])
def test_euler_steps_are_taken_whatever_the_table(kind, config):
    check_step_rule(kind(**config), "model")


def test_a_solver_of_first_order_is_euler():
    check_step_rule(scheduler("DPMSolverMultistepScheduler", **FLOW, solver_order=1), "model")


@pytest.mark.filterwarnings("ignore")  # diffusers' own
@pytest.mark.parametrize(
    ("name", "config", "cause"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "stochastic_sampling to false"),
        ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}, "invert_sigmas to false"),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}, "6 steps take 11 velocities.*shift 3"),
        ("FlowMatchLCMScheduler", {}, r"step \d of 6"),  # it draws noise
        ("EulerDiscreteScheduler", {}, "noise levels go from 157"),
        ("DDIMScheduler", {}, "cannot be asked"),
        ("UniPCMultistepScheduler", FLOW, "step 2 of 6.*shift 3"),
        ("UniPCMultistepScheduler", {**FLOW, "solver_order": 1}, "step 2 of 6"),
        ("DPMSolverMultistepScheduler", FLOW, "step 2 of 6"),
        ("DPMSolverSinglestepScheduler", FLOW, "step 2 of 6"),
    ],
)
def test_other_steps_are_refused(name, config, cause):
    with pytest.raises(ConfigError, match=rf"^model\.path='model': .* {name} .*{cause}"):
        check_step_rule(scheduler(name, **config), "model")


def test_a_subclass_is_judged_by_its_steps():
    with pytest.raises(ConfigError, match="OverShoots .*step 5 of 6"):
        check_step_rule(OverShoots(shift=3.0), "model")


def test_asking_changes_neither_the_scheduler_nor_the_generator():
    asked, state = (
        scheduler("FlowMatchEulerDiscreteScheduler", stochastic_sampling=True),
        torch.get_rng_state(),
    )
    before = asked.timesteps.clone()
    with pytest.raises(ConfigError):
        check_step_rule(asked, "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(asked.timesteps, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "stochastic_sampling "),
        ("FlowMatchEulerDiscreteScheduler", {"shift": "three"}, "sd3 pipeline: "),
        ("FlowMatchHeunDiscreteScheduler", {}, "FlowMatchHeunDiscreteScheduler .*11 velocities"),
        ("NoSuchScheduler", {}, "sd3 pipeline: .*NoSuchScheduler"),
    ],
)
def test_a_model_is_refused_when_it_is_loaded(name, config, named, tmp_path):
    folder = shutil.copytree(EMBEDDED["tiny_ocr"], tmp_path / "model")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FlowMatchEulerDiscreteScheduler", name))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name, **config}))
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}'.*{named}"):
        load_family(ModelConfig(path=str(folder)))
