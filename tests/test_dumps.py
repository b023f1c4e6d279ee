"""The file of a training step's log-probs: what it holds, who can write it, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file

import flowcorr
from flowcorr import dumps
from flowcorr.dumps import DumpedTerms, LoggedLoss
from flowcorr.dumps.replay import replay_files
from flowcorr.errors import BackendError, BatchError, ConfigError

WINDOW = torch.tensor([[-0.25, -0.5], [0.125, 1.0]])
ROWS = torch.tensor([3, 5])


def terms(**changes):
    """Two samples of two steps."""
    names = (
        "rollout_log_probs",
        "old_log_probs",
        "current_log_probs",
        "timesteps",
        "sigmas",
        "sigmas_next",
        "stds",
    )
    values = {name: WINDOW + place for place, name in enumerate(names)}
    values |= {"advantages": ROWS / 2, "rewards": ROWS / 4, "group_ids": ROWS, "policy_versions": ROWS}
    values |= {"worker_ids": ROWS, "sigmas": 1 - WINDOW.abs(), "sigmas_next": WINDOW.abs() / 2}
    values |= {"step_indices": torch.tensor([[0, 1], [1, 2]]), "num_elements": 12, "bypass": False}
    return DumpedTerms(**(values | changes))


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_same(one, other):
    assert (one.num_elements, one.bypass) == (other.num_elements, other.bypass)
    assert one.tensors().keys() == other.tensors().keys()
    for name, value in one.tensors().items():
        torch.testing.assert_close(value, other.tensors()[name], rtol=0, atol=0, equal_nan=True)


def test_a_file_holds_all_of_it(tmp_path):
    found = terms(current_old_kl=torch.full((2, 1), 0.5).expand(2, 2), bypass=True, old_log_probs=WINDOW)
    loss = LoggedLoss(loss_mode="grpo_guard", clip_ratio=2e-3, adv_clip_max=5.0)
    path = dumps.save(tmp_path / "log_probs", 7, found, loss)
    assert [file.name for file in (tmp_path / "log_probs").iterdir()] == ["step_000007.safetensors"]
    assert dumps.files(tmp_path) == {7: path} == dumps.files(tmp_path / "log_probs")
    assert_same(dumps.load(path), found)
    assert dumps.load_loss(path) == loss
    metadata = metadata_of(path)
    assert json.loads(metadata.pop("clip_ratio")) == 2e-3
    assert metadata == {
        "format_version": "1",
        "step": "7",
        "num_elements": "12",
        "mode": "bypass",
        "loss_mode": "grpo_guard",
        "adv_clip_max": "5.0",
    }


def test_any_trainer_can_write_one(tmp_path):
    """Arrays of numpy, names for groups, one value a sample or a step, and half precision."""
    path = flowcorr.dump(
        tmp_path / "a" / "b",
        3,
        rollout_log_probs=WINDOW.numpy(),
        old_log_probs=(WINDOW + 1).bfloat16(),
        advantages=np.array([[1.0, 1.0], [-1.0, -1.0]]),
        rewards=[[0.5, 0.5], [math.nan, math.nan]],
        group_ids=np.array(["x", "a"], dtype=object),
        step_indices=[0, 2],
        sigmas=torch.tensor([0.9, 0.8], requires_grad=True),
        num_elements=64,
        clip_ratio=[1e-4, 2e-4, 3e-4],
    )
    found = dumps.load(path)
    assert found.group_ids.tolist() == [1, 0]
    assert found.advantages.tolist() == [1, -1]
    assert found.rewards[0] == 0.5
    assert found.rewards[1].isnan()
    assert found.step_indices.tolist() == [[0, 2], [0, 2]]
    assert found.sigmas.shape == (2, 2)
    assert found.old_log_probs.dtype == torch.float32
    assert (found.num_elements, found.bypass, found.current_log_probs) == (64, False, None)
    assert dumps.load_loss(path) == LoggedLoss(clip_ratio=[1e-4, 2e-4, 3e-4])


@pytest.mark.parametrize(
    "kind", [np.array, np.float32, torch.tensor, lambda value: OmegaConf.create({"key": value}).key]
)
def test_numbers_may_be_of_any_library(kind, tmp_path):
    """As they come from `version = steps.max()`, `np.prod(shape)` or a configuration of OmegaConf."""
    whole = np.int64 if kind is np.float32 else kind
    path = flowcorr.dump(
        tmp_path,
        0,
        rollout_log_probs=WINDOW,
        advantages=ROWS,
        version=whole(3),
        num_elements=whole(64),
        clip_ratio=kind([0.25, 0.5]),
        adv_clip_max=kind(4.0),
    )
    found = dumps.load(path)
    assert (found.version, found.num_elements) == (3, 64)
    assert dumps.load_loss(path) == LoggedLoss(clip_ratio=[0.25, 0.5], adv_clip_max=4)


def test_without_old_log_probs_they_are_the_rollouts(tmp_path):
    found = dumps.load(flowcorr.dump(tmp_path, 0, rollout_log_probs=WINDOW, advantages=ROWS))
    assert found.bypass
    assert torch.equal(found.old_log_probs, found.rollout_log_probs)


def test_a_kl_in_bypass_mode_is_that_of_the_current_policy(tmp_path):
    given = {"rollout_log_probs": WINDOW, "advantages": ROWS, "old_rollout_kl": torch.ones_like(WINDOW)}
    found = dumps.load(flowcorr.dump(tmp_path, 0, **given, current_log_probs=WINDOW))
    assert found.old_rollout_kl is None
    assert torch.equal(found.current_rollout_kl, torch.ones(2, 2))
    with pytest.raises(BatchError, match="old_rollout_kl"):
        flowcorr.dump(tmp_path / "alone", 0, **given)


def test_what_is_missing_is_told_with_what_it_gives():
    known = DumpedTerms(rollout_log_probs=WINDOW, old_log_probs=WINDOW, advantages=ROWS, rewards=ROWS)
    missing = dumps.missing(known, LoggedLoss(clip_ratio=1e-3))
    fields = ["current_log_probs", "num_elements", "step_indices", "sigmas", "group_ids", "policy_versions"]
    assert missing == fields


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rollout_log_probs": ROWS}, r"rollout_log_probs .*\[2\]; .*\[B, T\],"),
        ({"advantages": WINDOW}, r"advantages .*\[2, 2\]; .* \[2\],"),
        ({"sigmas": torch.ones(3)}, r"sigmas .*\[3\]; .* \[2, 2\]$"),
        ({"old_log_probs": torch.ones(2, 3)}, r"old_log_probs .*\[2, 3\]; .* \[2, 2\]$"),
        *(
            ({name: ROWS}, rf"{name} .*\[2\]; .* \[2, 2\]$")
            for name in ("old_log_probs", "current_log_probs", "before_update", "old_rollout_kl")
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path, given, named):
    with pytest.raises(BatchError, match=f"^{named}"):
        flowcorr.dump(tmp_path, 1, **({"rollout_log_probs": WINDOW, "advantages": ROWS} | given))
    assert not dumps.files(tmp_path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rollout_log_probs": [[1.0, 2.0], [3.0]]}, "rollout_log_probs is no array"),
        ({"advantages": [1.0, None]}, "advantages is no array"),
        ({"old_log_probs": [torch.ones(2), torch.ones(3)]}, "old_log_probs is no array"),
        ({"clip_ratio": [[1e-3], 1e-3]}, "clip_ratio is no array"),
        ({"group_ids": ["a sign", None]}, r"group_ids .*\[B\] names$"),
        ({"loss_mode": 3}, "loss_mode=3 .* flow_grpo, "),
        ({"loss_mode": "grpo_gard"}, r"loss_mode='grpo_gard' .*grpo_guard\?.*package.module:name"),
        ({"loss_mode": "a:b:c"}, "loss_mode='a:b:c' .* flow_grpo, "),
    ],
)
def test_values_that_are_no_numbers_are_refused(tmp_path, given, named):
    with pytest.raises(BatchError, match=f"^{named}"):
        flowcorr.dump(tmp_path, 1, **({"rollout_log_probs": WINDOW, "advantages": ROWS} | given))


@pytest.mark.parametrize(
    "window",
    [
        WINDOW.numpy()[::-1].copy()[::-1],
        [row.clone().requires_grad_() for row in WINDOW],
        [row.bfloat16() for row in WINDOW],
    ],
    ids=["reversed", "with a graph", "bfloat16"],
)
def test_numbers_come_in_every_container(tmp_path, window):
    path = flowcorr.dump(
        tmp_path,
        0,
        rollout_log_probs=window,
        advantages=ROWS,
        group_ids=torch.tensor([7.0, 3.0]).bfloat16(),
        clip_ratio=torch.tensor(0.5).bfloat16(),
    )
    torch.testing.assert_close(dumps.load(path).rollout_log_probs, WINDOW, rtol=2**-8, atol=0.0)
    assert dumps.load(path).group_ids.tolist() == [1, 0]
    assert dumps.load_loss(path).clip_ratio == 0.5


def test_steps_can_be_joined():
    one, other = terms(), terms(rewards=torch.tensor([8.0, 9.0]))
    whole = DumpedTerms.concatenate([one, other])
    assert whole.rewards.tolist() == [0.75, 1.25, 8, 9]
    assert whole.sigmas.shape == (4, 2)


def test_what_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "log_probs").write_text("a file, where a folder should be")
    with pytest.raises(BackendError, match=r"step_000001\.safetensors .*trainer\.dump_log_probs=false"):
        dumps.save(tmp_path / "log_probs", 1, terms(), LoggedLoss())


@pytest.mark.parametrize("read", [dumps.load, dumps.load_loss])
def test_a_torn_file_is_named(tmp_path, read):
    path = tmp_path / "step_000001.safetensors"
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match=f"^{path} is damaged: .*header"):
        read(path)


HEADER = {"format_version": "1", "step": "1", "mode": "decoupled", "loss_mode": "flow_grpo"}


@pytest.mark.parametrize(
    ("tensors", "header", "named"),
    [
        ({}, {"format_version": "2", "num_elements": "12", "mode": "bypass"}, "format_version='2', .*'1';"),
        ({"sigmas": torch.ones(2, 3)}, HEADER, r"damaged: sigmas .*\[2, 3\]; .*\[2, 2\]"),
        ({"advantages": None}, HEADER, "damaged: advantages .*missing"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, tensors, header, named):
    path = tmp_path / "step_000001.safetensors"
    whole = terms().tensors() | tensors
    save_file({name: value.clone() for name, value in whole.items() if value is not None}, path, header)
    with pytest.raises(ConfigError, match=f"^{path} .*{named}"):
        dumps.load(path)


def test_terms_scored_before_the_first_update_are_marked(tmp_path):
    marks = torch.tensor([[True, False], [True, True]])
    given = {"rollout_log_probs": WINDOW, "current_log_probs": WINDOW, "advantages": [1.0, -1.0]}
    path = flowcorr.dump(tmp_path, 0, **given, before_update=marks)
    assert dumps.load(path).before_update.tolist() == [[1, 0], [1, 1]]
    with pytest.raises(BatchError, match="^before_update .* 2; .* 0 to 1$"):
        flowcorr.dump(tmp_path, 0, **given, before_update=[[2, 0], [1, 1]])


def test_a_step_given_as_text_is_named(tmp_path):
    with pytest.raises(BatchError, match="^step='3' .* whole number"):
        flowcorr.dump(tmp_path, "3", rollout_log_probs=torch.zeros(2, 1), advantages=torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"old_log_prob": torch.zeros(2, 1)}, r"'old_log_prob' .*old_log_probs\?"),
        ({"advantages": None}, "missing: advantages"),
    ],
)
def test_fields_that_are_unknown_or_missing_are_named(changes, named, tmp_path):
    given = {"rollout_log_probs": torch.zeros(2, 1), "advantages": torch.zeros(2)} | changes
    with pytest.raises(TypeError, match=named):
        dumps.dump(tmp_path, 1, **given)


def test_a_step_that_is_dumped_twice_is_told_and_loses_its_captured_samples(tmp_path):
    samples = dumps.ReplaySamples(
        prompts=["a"], initial_noise=torch.zeros(1, 2), images=torch.zeros(1, 8, 8, 3)
    )
    flowcorr.dump(tmp_path, 3, rollout_log_probs=WINDOW, advantages=ROWS, replay=samples)
    assert list(replay_files(tmp_path)) == [3]
    with pytest.warns(UserWarning, match=r"step_000003\.safetensors .* replaced"):
        flowcorr.dump(tmp_path, 3, rollout_log_probs=WINDOW, advantages=ROWS)
    assert list(replay_files(tmp_path)) == []
    flowcorr.dump(tmp_path, 4, rollout_log_probs=WINDOW, advantages=ROWS)
