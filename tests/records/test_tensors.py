from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from flowcorr.errors import BatchError, ConfigError
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch, LossOutput, Rollout, Scores, Terms, Window, check_shape
from tests.rollouts import make_rollout

SAMPLES, STEPS, LATENT = 4, 2, (3, 5)
EMBEDS = torch.arange(14.0).view(2, 7)


def rollout(**changes):
    conditioning = {
        "conditioning": {"prompt_embeds": EMBEDS},
        "conditioning_rows": torch.tensor([0, 0, 1, 1]),
    }
    return make_rollout(SAMPLES, STEPS, LATENT, **conditioning | changes)


def assert_same(one, other):
    assert type(one) is type(other)
    for name in type(one).__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if name == "conditioning":
            left, right = one.sample_conditioning(), other.sample_conditioning()
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left)
        elif isinstance(left, Window):
            assert_same(left, right)
        elif name != "conditioning_rows":  # parts that are joined keep a row each
            assert left is right or torch.equal(left, right), name


def test_sizes():
    record = rollout().validate()
    assert (record.num_samples, record.num_steps, record.num_elements) == (4, 2, 15)
    assert rollout(means=None).validate().window.means is None


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("log_probs", torch.zeros(4), r"\[4\]; .*\[B, T\]"),
        ("sigmas", torch.zeros(4, 1), r"\[4, 1\]; .*\[4, 2\]"),
        ("sigmas_next", torch.zeros(1, 2), r"\[1, 2\]; .*\[4, 2\]"),
        ("timesteps", torch.zeros(2), r"\[2\]; .*\[4, 2\]"),
        ("step_indices", torch.zeros(3, 2), r"\[3, 2\]; .*\[4, 2\]"),
        ("group_ids", torch.zeros(1), r"\[1\]; .*\[4\]"),
        ("policy_versions", torch.zeros(4, 1), r"\[4, 1\]; .*\[4\]"),
        ("latents", torch.zeros(4, 3, 3, 5), r"\[4, 3, 3, 5\]; .*\[4, 2, 3, 5\]"),
        ("next_latents", torch.zeros(4, 2, 3, 1), r"\[4, 2, 3, 1\]; .*\[4, 2, 3, 5\]"),
        ("means", torch.zeros(4, 2, 3, 1), r"\[4, 2, 3, 1\]; .*\[4, 2, 3, 5\]"),
        ("stds", torch.zeros(4), r"\[4\]; .*\[4, 2\]"),
        ("conditioning_rows", torch.zeros(3), r"\[3\]; .*\[4\]"),
        ("conditioning_rows", None, "missing"),
        (
            "conditioning",
            {"embeds": torch.zeros(2, 7), "pooled": torch.zeros(1, 7)},
            r"\['pooled'\] .*\[1, 7\]; .*G=2,",
        ),
    ],
)
def test_shapes_that_do_not_fit(field, value, named):
    with pytest.raises(BatchError, match=rf"^(Rollout|Window)\.{field}\b.*{named}"):
        rollout(**{field: value}).validate()


@pytest.mark.parametrize(
    ("field", "dtype", "needed"),
    [
        ("latents", torch.bfloat16, "float32"),
        ("log_probs", torch.float16, "float32"),
        ("step_indices", torch.float32, "int64"),
        ("group_ids", torch.int32, "int64"),
    ],
)
def test_dtypes_that_lose_digits(field, dtype, needed):
    record = rollout()
    value = getattr(record, field, getattr(record.window, field, None))
    with pytest.raises(BatchError, match=rf"^Rollout's {field} .* {dtype}; .* torch\.{needed}$"):
        rollout(**{field: value.to(dtype)}).validate()


def test_an_engine_returns_images():
    with pytest.raises(BatchError, match=r"Rollout\.images "):
        _ = rollout(images=None).decoded


def test_selection_and_concatenation_undo_each_other():
    record = rollout()
    parts = [record.select(slice(0, 1)), record.select(slice(1, 4))]
    assert parts[0].validate().num_samples == 1
    assert_same(Rollout.concatenate(parts), record)
    order = torch.tensor([2, 0, 3, 1])
    assert_same(record.select(order).select(torch.argsort(order)), record)


def test_samples_of_a_prompt_share_a_row_of_conditioning():
    record = rollout()
    embeds = record.conditioning["prompt_embeds"]
    assert torch.equal(record.sample_conditioning()["prompt_embeds"], embeds[[0, 0, 1, 1]])
    assert torch.equal(record.sample_conditioning(torch.tensor([3, 0]))["prompt_embeds"], embeds[[1, 0]])
    some = record.select(torch.tensor([3, 0]))
    assert torch.equal(some.sample_conditioning()["prompt_embeds"], embeds[[1, 0]])
    assert some.conditioning["prompt_embeds"] is record.only(torch.tensor([1])).conditioning["prompt_embeds"]
    joined = Rollout.concatenate([record, rollout(conditioning={"prompt_embeds": embeds + 1})]).validate()
    assert joined.conditioning["prompt_embeds"].shape == (4, 7)
    expected = torch.cat([embeds, embeds + 1])[[0, 0, 1, 1, 2, 2, 3, 3]]
    assert torch.equal(joined.sample_conditioning()["prompt_embeds"], expected)
    assert rollout(conditioning={}, conditioning_rows=None).validate().sample_conditioning() == {}


def test_optional_fields_stay_absent():
    record = rollout(means=None, images=None)
    joined = Rollout.concatenate([record.select(slice(0, 2)), record.to("cpu").select(slice(2, 4))])
    assert joined.window.means is None
    assert joined.images is None


def test_actor_batches_select_all_their_fields():
    batch = ActorBatch(
        rollout=rollout(),
        advantages=torch.arange(4.0),
        old_log_probs=torch.arange(8.0).view(4, 2),
        keep=torch.tensor([[True, False]] * 4),
    )
    part = batch.select(torch.tensor([3, 1]))
    assert part.advantages.tolist() == [3.0, 1.0]
    assert part.old_log_probs.tolist() == [[6.0, 7.0], [2.0, 3.0]]
    assert part.keep.shape == (2, 2)
    assert part.rollout_is_weights is None
    assert_same(part.rollout, batch.rollout.select(torch.tensor([3, 1])))


def test_a_step_is_a_window_of_its_own():
    batch = ActorBatch(
        rollout=rollout(),
        advantages=torch.arange(4.0),
        old_log_probs=torch.arange(8.0).view(4, 2),
        old_means=torch.rand(4, 2, *LATENT),
    )
    last = batch.step(1)
    assert last.rollout.validate().num_steps == 1
    assert torch.equal(last.rollout.window.latents, batch.rollout.window.latents[:, 1:])
    assert torch.equal(last.rollout.window.next_latents, batch.rollout.window.next_latents[:, 1:])
    assert torch.equal(last.rollout.window.step_indices, batch.rollout.window.step_indices[:, 1:])
    assert torch.equal(last.old_log_probs, batch.old_log_probs[:, 1:])
    assert torch.equal(last.old_means, batch.old_means[:, 1:])
    assert torch.equal(last.advantages, batch.advantages)
    assert last.keep is None


def test_terms_are_the_steps_of_a_window():
    numbers = torch.rand(4, 2)
    columns = dict.fromkeys(
        ("log_prob", "old_log_prob", "rollout_log_prob", "advantage", "std", "step", "step_index"), numbers
    )
    window = Terms(**columns, old_kl=2 * numbers, num_elements=3)
    terms = window.per_term()
    assert terms.old_log_prob.shape == terms.advantage.shape == terms.step_index.shape == (8,)
    assert torch.equal(terms.old_kl, 2 * numbers.flatten())
    assert (terms.rollout_kl, terms.weight, terms.num_elements) == (None, None, 3)
    assert torch.equal(terms.windows().std, numbers.view(8, 1))
    assert window.windows() is window
    parts = [window.select(slice(0, 1)), window.select(torch.tensor([1, 2, 3]))]
    assert_same(Terms.concatenate(parts), window)


def test_scores_are_cut_and_joined_along_both_axes():
    numbers, means = torch.rand(4, 2), torch.rand(4, 2, *LATENT)
    scores = Scores(log_probs=numbers, means=means, stds=numbers)
    assert_same(
        Scores.concatenate([scores.select(torch.tensor([0])), scores.select(torch.arange(1, 4))]), scores
    )
    wide = Scores.concatenate([scores, scores], dim=1)
    assert (wide.log_probs.shape, wide.means.shape) == ((4, 4), (4, 4, *LATENT))
    without = replace(scores, means=None)
    assert Scores.concatenate([without, without]).means is None


def test_records_are_frozen_and_derived_by_replace():
    record = rollout()
    with pytest.raises(FrozenInstanceError):
        record.log_probs = torch.zeros(4, 2)
    assert replace(record, log_probs=torch.zeros(4, 2)).log_probs.sum() == 0
    assert record.log_probs.sum() != 0


@pytest.mark.parametrize(
    ("count_all", "count_kept", "kept", "over_all"),
    [(4, 2, -3.0, -1.5), (3, 0, -6.0, -2.0), (0, 0, -6.0, -6.0)],
)
def test_loss_denominators(count_all, count_kept, kept, over_all):
    output = LossOutput(
        loss_sum=torch.tensor(-6.0),
        count_all=torch.tensor(count_all),
        count_kept=torch.tensor(count_kept),
        metrics=Metrics(),
    )
    assert output.mean().item() == output.mean("kept").item() == kept
    assert output.mean("all").item() == over_all
    with pytest.raises(ConfigError, match="^denominator='keep' .* kept, all$"):
        output.mean("keep")


def test_check_shape_names_the_tensor():
    check_shape("x", torch.zeros(2, 3), (2, 3))
    with pytest.raises(BatchError, match=r"^x .*\[2, 3\]; .*\[2\],"):
        check_shape("x", torch.zeros(2, 3), (2,))
