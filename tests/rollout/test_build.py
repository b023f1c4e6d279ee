"""From a configuration to the engine that samples."""

import sys

import pytest
import torch

from flowcorr.config import Engine, load
from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.rollout import InProcessEngine
from flowcorr.rollout.build import build_backend, check_installed


@pytest.mark.parametrize(
    ("override", "package", "extra"),
    [
        ("rollout.name=vllm_omni", "vllm_omni", "vllm-omni"),
        ("rollout.placement=ray", "ray", "ray"),
        ("reward.placement=ray", "ray", "ray"),
        ("actor.optimizer=adamw_8bit", "bitsandbytes", "adam8bit"),
        ("model.quantization=nf4", "bitsandbytes", "quantized"),
    ],
)
def test_a_missing_extra_is_named_with_the_key_that_needs_it(monkeypatch, override, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"^{override} needs \S+; .*flowcorr\[{extra}\]"):
        check_installed(load("tiny_jpeg_lora", [override]))
    check_installed(load("tiny_jpeg_lora"))


class WithoutClose:
    """An engine that lacks methods."""

    history = ()

    def __init__(self, config, family, *, merge, base, probe):
        pass

    def sample(self, conditioning, groups, *, training_step, with_means, on_images):
        return None


HALF = Engine(build="rollout.test_build:WithoutClose")


def test_an_engine_without_methods_is_refused_with_their_names():
    config = load("tiny_jpeg_lora", ["rollout.name=rollout.test_build:HALF", "rollout.emulate=none"])
    with pytest.raises(ConfigError, match=r"test_build:HALF: .* restore, sync, close; "):
        build_backend(config, None, merge=None, base=None, probe=None)


def test_an_engine_samples_as_the_one_that_the_trainer_builds(make_run):
    run = make_run()
    weights = run.actor.weights
    engine = build_backend(run.config, run.family, merge=weights.merged, base=weights.untrained, probe=None)
    assert isinstance(engine, InProcessEngine)
    engine.sync(weights.snapshot())
    found = engine.sample(run.conditioning, range(2), training_step=1, with_means=False)
    assert torch.equal(found.window.next_latents, run.sample(with_means=False).window.next_latents)
