"""Keys of verl-omni that are not translated."""

import pytest

from tests.translate.configs import OMNI

EVALUATED = f"{OMNI}rollout.val_kwargs"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (f"{EVALUATED}.pipeline.true_cfg_scale=1.0", False),  # as in training
        (f"{EVALUATED}.pipeline.true_cfg_scale=4.0", True),
        (f"{EVALUATED}.n=1", False),
        (f"{EVALUATED}.n=4", True),
        (f"{EVALUATED}.algo.noise_level=0.0", False),
        (f"{EVALUATED}.algo.noise_level=0.7", True),
        (f"{OMNI}model.algo.noise_level=1.0", False),
        (f"{OMNI}model.algo.noise_level=0.5", True),
        (f"{OMNI}actor.rollout_correction.bypass_mode=false", False),
        (f"{OMNI}actor.rollout_correction.bypass_mode=true", True),
        ("trainer.resume_from_path=a/run", True),
        ("trainer.val_only=true", True),
        ("trainer.v1.sampler.max_off_policy_threshold=8", False),  # of trainer.use_v1
        ("skip.rollout.enable=true", True),
        ("reward.reward_model.rollout.temperature=1.0", True),  # of the judge
        ("reward.reward_model.rollout.max_num_seqs=64", False),
        (f"{OMNI}rollout.agent.num_workers=2", False),
        (f"{OMNI}rollout.agent.agent_loop_config_path=mine.yaml", True),
        (f"{OMNI}rollout.unheard_of=false", True),
        (f"{OMNI}actor.fsdp_config.unheard_of=1", True),
        (f"{OMNI}model.unheard_of=null", False),
    ],
)
def test_what_may_change_training_or_evaluations_is_named(omni, override, named):
    key, _, value = override.partition("=")
    listed = [line.casefold() for line in omni(override)[1].splitlines() if line.startswith("#   ")]
    assert (f"#   {key}={value}" in listed) == named
