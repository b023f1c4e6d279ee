"""What must hold on a GPU as it does on a CPU: `python -m pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from flowcorr import config
from flowcorr.actor.adamw import OPTIMIZERS
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.models import Guidance, load_family
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step
from tests.prompts import prompts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_correction_equals_the_cpus_and_reads_the_device_once():
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(512, 2, generator=draw)
    old = rollout + 0.01 * torch.randn(512, 2, generator=draw)
    options = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": (0.99, 1.01)}
    expected = compute_rollout_correction_and_rejection_mask(old, rollout, **options)
    there = old.cuda(), rollout.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = compute_rollout_correction_and_rejection_mask(*there, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.weights.cpu(), expected.weights)
    assert torch.equal(found.keep.cpu(), expected.keep)
    assert found.metrics.compute() == pytest.approx(expected.metrics.compute(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("preset", "clip"),
    [
        ("decoupled_seq_is", ()),
        ("bypass_ppo_clip", ("actor.clip_ratio=[1e-3, 1e-3, 2e-3, 4e-3]",)),
    ],
)
def test_a_training_step_runs_in_bfloat16(preset, clip):
    settings = config.load(
        "tiny_jpeg_lora",
        [
            f"algorithm.rollout_correction.preset={preset}",
            *clip,
            "rollout.dtype=bfloat16",
            "rollout.prompts_per_step=2",
            "rollout.n=4",
            "data.num_train=8",
            "data.num_heldout=4",
        ],
    )
    run, _ = build_run(settings)
    assert run.actor.device.type == "cuda"
    run.engine.sync(run.actor.weights.snapshot())
    metrics = train_step(run, 1, lambda _: None).metrics.compute()
    assert metrics["actor/updates"] == 2
    assert 0 < metrics["rollout_corr/logprob_abs_diff_mean"] < 1e-2


def test_moments_in_8_bits_follow_adamw_and_resume_with_the_same_bits():
    pytest.importorskip("bitsandbytes")
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(5, 70, 100, generator=draw).to("cuda")  # the last block is not full

    def trained(name, weight, gradients, state):
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = OPTIMIZERS[name]({"weight": parameter}, ActorConfig(optimizer=name))
        optimizer.load_state(state)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step(1e-3)
        return parameter.data, optimizer.state()

    exact, _ = trained("adamw", start, gradients, {})
    whole, _ = trained("adamw_8bit", start, gradients, {})
    half, state = trained("adamw_8bit", start, gradients[:2], {})
    resumed, _ = trained("adamw_8bit", half, gradients[2:], state)
    assert 0 < (whole - exact).norm() < 0.05 * (exact - start).norm()
    assert torch.equal(resumed, whole)


def test_offloaded_text_encoders_compute_on_the_device_and_go_back():
    model = config.ModelConfig(max_sequence_length=8)
    expected = load_family(model, "cuda").encode(prompts_of(["cat", "dog"]), Guidance())
    family = load_family(replace(model, offload_text_encoders=True), "cuda")
    for _ in range(2):
        found = family.encode(prompts_of(["cat", "dog"]), Guidance())
        assert {rows.device.type for rows in found.values()} == {"cuda"}
        torch.testing.assert_close(found, expected)
    parts = family.pipeline.components.items()
    encoders = [part for name, part in parts if name.startswith("text_encoder")]
    assert {parameter.device.type for part in encoders for parameter in part.parameters()} == {"cpu"}
    assert family.transformer.device.type == "cuda"
