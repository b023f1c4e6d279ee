"""Whether a family of one's own is its pipeline: asked by the doctor, and by a run that trains it."""

from dataclasses import replace

import pytest
from instruments.doctor.faults import GUIDED, SHORT, SMALL, assert_named, check, finding_of

from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor import diagnose
from flowcorr.instruments.doctor.examination import RELEASED, examine
from flowcorr.models.sd3 import SD3
from flowcorr.trainer.setup import build_run


class Right(SD3):
    """A family of one's own that is right."""


class Late(SD3):
    """Timesteps are 2 % off."""

    def schedule(self, num_inference_steps, latent_shape):
        right = super().schedule(num_inference_steps, latent_shape)
        return replace(right, timesteps=tuple(1.02 * timestep for timestep in right.timesteps))


class Forgetful(SD3):
    """`embed` reads another negative prompt than the one it is given."""

    def embed(self, prompts, guidance):
        return super().embed(prompts, replace(guidance, negative_prompt=""))


class Unguided(SD3):
    """`embed` returns nothing for the negative prompt."""

    def embed(self, prompts, guidance):
        conditioning = super().embed(prompts, guidance)
        return {name: rows for name, rows in conditioning.items() if not name.startswith("negative_")}


@pytest.fixture
def config_of(make_config):
    def of(family, **sections):
        model = {"family": f"{__name__}:{family.__name__}"}
        return make_config(**{"model": model, "rollout": SMALL, "sampling": {**SHORT, **GUIDED}} | sections)

    return of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_family_passes(config_of, make_config, dtype):
    model = {"family": f"{__name__}:Right", "dtype": dtype}
    report = diagnose(config_of(Right, model=model, rollout={**SMALL, "dtype": dtype}))
    assert report.causes() == []
    finding = finding_of(report, "adapter")
    assert finding.level == "healthy"
    assert finding.numbers["value"] < 1e-4
    assert "with guidance" in finding.sentence


@pytest.mark.parametrize(("family", "part"), [(Late, "timesteps"), (Forgetful, "negative_prompt")])
def test_a_wrong_family_is_named(config_of, family, part):
    assert_named(diagnose(config_of(family)), "adapter", parts=[part])


@pytest.mark.parametrize(("family", "part"), [(Late, "timestep"), (Forgetful, "negative prompt")])
def test_training_warns_of_a_wrong_family(config_of, family, part):
    with pytest.warns(UserWarning, match=rf"{family.__name__} differs .*{part}"):
        run, _ = build_run(config_of(family))
    run.engine.close()


def test_guidance_without_a_negative_side_is_refused(config_of):
    with pytest.raises(ConfigError, match=r"Unguided: sampling\.guidance_scale=4 "):
        build_run(config_of(Unguided))


def test_where_the_text_encoders_are_gone_it_says_so(small_run):
    run = small_run()
    run.engine.sync(run.actor.weights.snapshot())
    report = examine(run.actor, run.engine, run.conditioning, adapter=RELEASED)
    finding = finding_of(report, "adapter")
    assert finding.level == "note"
    assert RELEASED in finding.sentence
    assert "adapter" not in {finding.cause for finding in check(run, run.engine).findings}
