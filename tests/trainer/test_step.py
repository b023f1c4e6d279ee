"""What a training step does with rewards that are not as they should be, and with those that choose its samples."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from flowcorr.advantages import group_advantages, most_varied
from flowcorr.errors import BackendError
from flowcorr.records import ActorBatch, Rollout
from flowcorr.trainer.collect import drop_failed_groups
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import StepResult, train_step
from tests.rollouts import make_rollout
from tests.tolerances import LOG_PROBS
from tests.trainer.runs import lasting, small_config

GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("failed", "kept"), [([], [0, 1, 2, 3, 4, 5]), ([2], [0, 1, 4, 5]), ([0, 1, 5], [2, 3])]
)
def test_a_failed_sample_takes_its_group_along(failed, kept):
    mask = np.zeros(6, dtype=bool)
    mask[failed] = True
    assert drop_failed_groups(make_rollout(6, group_ids=GROUPS), mask).tolist() == kept


def test_no_group_left_is_an_error():
    with pytest.raises(BackendError, match="4 of 6 samples"):
        drop_failed_groups(
            make_rollout(6, group_ids=GROUPS), np.array([True, False, False, True, True, True])
        )


def test_a_step_keeps_neither_copies_of_samples_nor_gradients(monkeypatch):
    """Beside a model that fills the GPU, a step's conditioning and latents are gigabytes, and so are gradients."""
    run, _ = build_run(small_config())
    run.engine.sync(run.actor.weights.snapshot())
    sample, update, seen = run.engine.sample, run.actor.update, []
    monkeypatch.setattr(
        run.engine, "sample", lambda *args, **key: seen.append(drawn := sample(*args, **key)) or drawn
    )
    monkeypatch.setattr(
        run.actor,
        "update",
        lambda batch, *args, **key: seen.append(batch.rollout) or update(batch, *args, **key),
    )
    train_step(run, 1, lambda _: None)
    run.close()
    sampled, learned = seen
    assert learned.window.latents.data_ptr() == sampled.window.latents.data_ptr()
    assert learned.images is None
    assert [name for name, weight in run.actor.weights.parameters.items() if weight.grad is not None] == []


SIX = ("rollout.n=6",)
FOUR_OF_SIX = (*SIX, "rollout.n_learned=4")
BYPASS = "algorithm.rollout_correction.preset=bypass_ppo_clip"
OWN = "reward.terms=[{{name: 'tests.trainer.test_step:{}'}}]"


def by_place(images, prompts):
    """`0, .. B - 1`, but all alike for the images of the first prompt."""
    return [float(place) * (prompt.text != prompts[0].text) for place, prompt in enumerate(prompts)]


def first_fails(images, prompts):
    return [float("nan"), *range(1, len(prompts))]


@dataclass
class Seen:
    """A first training step: what was sampled, recomputed and learned from, in the order of its phases."""

    phases: list[str] = field(default_factory=list)
    sampled: list[Rollout] = field(default_factory=list)
    recomputed: list[Rollout] = field(default_factory=list)
    learned: list[ActorBatch] = field(default_factory=list)
    result: StepResult | None = None


def first_step(monkeypatch, *overrides) -> Seen:
    run, _ = build_run(small_config("rollout.replay_every=0", *overrides))
    run.engine.sync(run.actor.weights.snapshot())
    seen = Seen()
    sample, log_probs, update = run.engine.sample, run.actor.log_probs, run.actor.update
    monkeypatch.setattr(
        run.engine, "sample", lambda *args, **key: seen.sampled.append(drawn := sample(*args, **key)) or drawn
    )
    monkeypatch.setattr(
        run.actor,
        "log_probs",
        lambda rollout, **key: seen.recomputed.append(rollout) or log_probs(rollout, **key),
    )
    monkeypatch.setattr(
        run.actor,
        "update",
        lambda batch, *args, **key: seen.learned.append(batch) or update(batch, *args, **key),
    )
    seen.result = train_step(run, 1, seen.phases.append)
    run.close()
    return seen


def assert_same_samples(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.group_ids, other.group_ids)
    assert torch.equal(one.members, other.members)
    assert torch.equal(one.log_probs, other.log_probs)
    for name in ("latents", "next_latents", "timesteps", "sigmas"):
        assert torch.equal(getattr(one.window, name), getattr(other.window, name)), name


def test_only_the_extremes_are_recomputed_and_learned_from(monkeypatch):
    """They are those of a step that samples the same batch and learns from all, to the bit."""
    whole, chosen = (first_step(monkeypatch, *keys) for keys in (SIX, FOUR_OF_SIX))
    scores = torch.as_tensor(chosen.result.scores)
    assert scores.tolist() == whole.result.scores.tolist()
    (all_samples,), (learned,) = whole.learned, chosen.learned
    places = most_varied(scores, all_samples.rollout.group_ids, 4)
    assert len(places) == 8
    assert_same_samples(learned.rollout, all_samples.rollout.select(places))
    (recomputed,) = chosen.recomputed
    assert_same_samples(recomputed, learned.rollout)
    expected = group_advantages(scores[places], learned.rollout.group_ids)
    assert torch.equal(learned.advantages, expected)
    torch.testing.assert_close(learned.old_log_probs, all_samples.old_log_probs[places], **LOG_PROBS)


def test_rewards_that_choose_are_waited_for(monkeypatch):
    whole, chosen = (first_step(monkeypatch, *keys) for keys in (SIX, FOUR_OF_SIX))
    assert whole.phases[:3] == ["rollout", "old_log_prob", "reward"]
    assert chosen.phases[:3] == ["rollout", "reward", "old_log_prob"]


def test_rewards_are_measured_over_all_samples_and_the_gap_over_those_that_are_learned_from(monkeypatch):
    whole, chosen = (
        first_step(
            monkeypatch, *keys, OWN.format("by_place"), "rollout.emulate=int8"
        ).result.metrics.compute()
        for keys in (SIX, FOUR_OF_SIX)
    )
    rewards = {name for name in whole if name.startswith("reward/")}
    assert {name: chosen[name] for name in rewards} == {name: whole[name] for name in rewards}
    assert chosen["reward/zero_std_group_fraction"] == 0.5
    # One group has equal rewards. Of 6 .. 11, the two lowest and the two highest have the mean of all.
    assert chosen["reward/learned_advantage"] == pytest.approx(0, abs=1e-12)
    assert "reward/learned_advantage" not in whole
    assert chosen["actor/zero_advantage_fraction"] == 0.5
    assert chosen["rollout_corr/kl"] != whole["rollout_corr/kl"]


def test_a_group_of_equal_rewards_is_learned_from_as_ever(monkeypatch):
    """It has as many samples, of advantage 0, and counts in the denominator."""
    (learned,) = first_step(monkeypatch, *FOUR_OF_SIX, OWN.format("by_place")).learned
    assert learned.rollout.group_ids.tolist() == [0] * 4 + [1] * 4
    assert learned.advantages[:4].tolist() == [0.0] * 4
    assert learned.rollout.members.tolist()[4:] == [0, 1, 4, 5]


def test_a_failed_sample_takes_its_group_along_though_enough_others_are_left(monkeypatch):
    keys = (*FOUR_OF_SIX, OWN.format("first_fails"), "reward.on_error=drop_group")
    (learned,) = first_step(monkeypatch, *keys).learned
    assert learned.rollout.group_ids.tolist() == [1] * 4


def test_in_bypass_mode_the_rollouts_log_probs_of_the_chosen_are_the_old_ones(monkeypatch):
    seen = first_step(monkeypatch, *FOUR_OF_SIX, BYPASS)
    (learned,) = seen.learned
    assert seen.recomputed == []
    assert learned.rollout.num_samples == 8
    assert torch.equal(learned.old_log_probs, learned.rollout.log_probs)


def test_learning_from_as_many_as_are_sampled_changes_nothing(monkeypatch):
    whole, chosen = (first_step(monkeypatch, *SIX, *keys) for keys in ((), ("rollout.n_learned=6",)))
    ours, theirs = (
        {
            name: value
            for name, value in lasting(each.result.metrics.compute()).items()
            if "/learned_" not in name
        }
        for each in (whole, chosen)
    )
    assert ours == theirs
    assert torch.equal(whole.learned[0].advantages, chosen.learned[0].advantages)


def test_a_dump_holds_what_was_learned_from(monkeypatch):
    keys = (*FOUR_OF_SIX, OWN.format("by_place"), "trainer.dump_log_probs=true")
    seen = first_step(monkeypatch, *keys)
    terms, (learned,) = seen.result.terms, seen.learned
    assert terms.group_ids.tolist() == learned.rollout.group_ids.tolist()
    assert terms.rewards.tolist() == [0.0] * 4 + [6.0, 7.0, 10.0, 11.0]
    assert torch.equal(terms.advantages, learned.advantages)
