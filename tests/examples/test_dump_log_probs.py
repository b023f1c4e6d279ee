"""The snippets that dump another trainer's log-probs, on batches as those trainers have them."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tensordict import TensorDict

from flowcorr import dumps
from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.report.runs import read_run
from tests.examples.scripts import load

B, T, LATENT = 16, 2, (16, 8, 8)


@pytest.fixture(scope="module")
def snippets():
    return load("dump_log_probs")


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    # accelerate's own tests reset it so; there is no public way.
    AcceleratorState._reset_state(reset_partial_state=True)


def log_probs(*, size=1e-4):
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(B, T, generator=draw)
    return rollout, rollout + size * torch.randn(B, T, generator=draw)


def check(folder, metrics):
    """All three tools read it, and the metrics that were returned are the report's."""
    (record,) = read_run(folder).records
    assert metrics == {name: value for name, value in record.items() if name.startswith("rollout_corr/")}
    report = audit_folder(folder)
    assert report.fact("num_elements") == 1024
    assert report.table("presets")
    assert metrics["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(1e-4, rel=0.5)
    return dumps.load(dumps.files(folder)[3])


def test_a_data_proto_of_verl(snippets, tmp_path):
    """Its shapes: `[B, T]` advantages, `[B, 1]` or `[B]` rewards, names for groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        protocol = pytest.importorskip("verl.protocol", reason="verl is not installed")
    rollout, old = log_probs()
    tensors = {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "advantages": torch.randn(B, 1).expand(B, T),
        "sample_level_rewards": torch.rand(B, 1),
        "all_timesteps": torch.tensor([900.0, 800.0]).repeat(B, 1),
        "all_latents": torch.zeros(B, T + 1, *LATENT),
    }
    uid = np.array([f"prompt-{sample // 4}" for sample in range(B)], dtype=object)
    data = protocol.DataProto(TensorDict(tensors, batch_size=[B]), {"uid": uid}, {})
    loss = SimpleNamespace(clip_ratio=1e-4)
    actor = SimpleNamespace(diffusion_loss=loss)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor))
    found = check(tmp_path, snippets.dump_verl_omni(tmp_path, 3, data, config))
    assert not found.bypass
    assert found.group_ids.tolist() == [sample // 4 for sample in range(B)]
    assert found.sigmas[0].tolist() == pytest.approx([0.9, 0.8])


def test_samples_of_one_window_of_verl_omni_are_captured(snippets):
    """Each sample has a window of its own; of each prompt one sample comes first."""
    places = [1, 2, 1, 1, 2, 1, 1, 1]
    prompts = ["cat", "cat", "cat", "cat", "dog", "dog", "dog", "dog"]
    schedule = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.1, 0.0])
    rows = torch.arange(8.0)
    latents = rows.view(8, 1, 1, 1).expand(8, *LATENT)
    batch = {
        "all_timesteps": torch.stack([1000 * schedule[place : place + T] for place in places]),
        "all_latents": latents[:, None].expand(8, T + 1, *LATENT),
        "initial_noise": latents,
        "final_latents": latents,
        "schedule": schedule.expand(8, -1),
        "rollout_log_probs": rows[:, None].expand(8, T),
        "responses": torch.zeros(8, 3, 16, 24, dtype=torch.uint8),
        "sample_level_rewards": rows[:, None].expand(8, T),
    }
    columns = {
        "uid": np.array(prompts, dtype=object),
        "raw_prompt": np.array([[{"content": prompt}] for prompt in prompts], dtype=object),
    }
    sampling = SimpleNamespace(guidance_scale=4.5, max_sequence_length=32)
    rollout = SimpleNamespace(
        pipeline=sampling, algo=SimpleNamespace(noise_level=0.8, sde_type="sde"), dtype="float32"
    )
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout, model=SimpleNamespace(lora_alpha=8))
    )
    found = snippets.capture_verl_omni(SimpleNamespace(batch=batch, non_tensor_batch=columns), config)
    assert found.prompts == ("cat", "dog", "cat", "dog")
    assert found.rewards.tolist() == found.initial_noise[:, 0, 0, 0].tolist() == [0, 5, 2, 6]
    assert found.step_indices.tolist() == [1, 2]
    assert found.images.shape == (4, 16, 24, 3)
    (absent,) = found.missing()
    assert "adapter" in absent


def test_samples_of_flow_grpo(snippets, accelerator, tmp_path):
    rollout, current = log_probs()
    samples = {
        "log_probs": rollout,
        "advantages": torch.randn(B, 1).repeat(1, T),
        "timesteps": torch.tensor([1000.0, 900.0]).repeat(B, 1),
        "latents": torch.zeros(B, T, *LATENT),
    }
    current[B // 2 :] += 0.1  # learned: two of four mini-batches follow the first update
    collected, fresh = torch.full_like(rollout, torch.nan), torch.zeros_like(rollout)
    first = global_step = 5
    for i, batch in enumerate(current.unflatten(0, (4, -1))):  # as the docstring says
        for j in range(T):
            collected.unflatten(0, (4, -1))[i, :, j] = batch[:, j]
            fresh.unflatten(0, (4, -1))[i, :, j] = global_step == first
        global_step += i % 2
    config = SimpleNamespace(train=SimpleNamespace(clip_range=1e-4))
    metrics = snippets.dump_flow_grpo(tmp_path, 3, samples, collected, fresh, accelerator, config)
    found = check(tmp_path, metrics)
    assert found.bypass
    assert torch.equal(found.current_log_probs, current)
    assert found.before_update.sum(1).tolist() == [T] * 8 + [0] * 8


def test_grids_of_miles_diffusion(snippets, tmp_path):
    """Its shapes: `[B, T]` grids of a window, whose tiles are scored one after the other."""
    rollout, current = log_probs()
    grids = {
        "log_prob_old": rollout,
        "advantage": torch.randn(B, 1).expand(-1, T),
        "timesteps": torch.tensor([1000.0, 900.0]).repeat(B, 1),
        "latents": torch.zeros(B, T, *LATENT),
    }
    for sample_indices in torch.arange(B).split(3):
        for tstep_indices in torch.arange(T).split(1):  # as the docstring says
            log_prob_new = current[sample_indices][:, tstep_indices]
            scored = grids.setdefault("scored", torch.full_like(grids["log_prob_old"], torch.nan))
            scored[sample_indices[:, None], tstep_indices] = log_prob_new
    found = check(tmp_path, snippets.dump_miles_diffusion(tmp_path, 3, grids, 1e-4))
    assert found.bypass
    assert torch.equal(found.current_log_probs, current)
    assert found.before_update.all()


def test_samples_of_flow_factory(snippets, accelerator, tmp_path):
    """Its shapes: one record a sample, which stores the steps that it trains, by maps of their indices."""
    rollout, current = log_probs()
    steps = torch.tensor([1, 3])
    samples = [
        SimpleNamespace(
            log_probs=rollout[sample],
            log_prob_index_map=torch.tensor([-1, 0, -1, 1]),
            all_latents=torch.zeros(T + 2, *LATENT),
            timesteps=torch.tensor([1000.0, 900.0, 700.0, 400.0]),
            unique_id=10**15 + sample // 4,
            extra_kwargs={"advantage": torch.tensor(float(sample))},
        )
        for sample in range(B)
    ]
    trainer = SimpleNamespace(
        accelerator=accelerator,
        adapter=SimpleNamespace(scheduler=SimpleNamespace(train_timesteps=steps)),
        training_args=SimpleNamespace(clip_range=(-1e-4, 1e-4)),
    )
    fresh = torch.ones_like(current)
    metrics = snippets.dump_flow_factory(tmp_path, 3, samples, current, fresh, trainer)
    found = check(tmp_path, metrics)
    assert torch.equal(found.rollout_log_probs, rollout)
    assert found.group_ids.tolist() == [sample // 4 for sample in range(B)]
    assert (found.step_indices[0].tolist(), found.sigmas[0].tolist()) == ([1, 3], pytest.approx([0.9, 0.4]))


def test_a_loop_with_accelerate(snippets, accelerator, tmp_path):
    rollout, old = log_probs()
    samples = {
        "log_probs": rollout,
        "old_log_probs": old,
        "advantages": torch.randn(B),
        "rewards": torch.rand(B),
        "groups": torch.arange(B) // 4,
        "latents": torch.zeros(B, T, *LATENT),
    }
    metrics = snippets.dump_accelerate(tmp_path, 3, samples, accelerator, clip_ratio=1e-3)
    assert check(tmp_path, metrics).rewards.tolist() == samples["rewards"].tolist()
