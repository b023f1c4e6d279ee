"""UniRL's records of a rollout, read into a dump by the example's lines, and judged by the doctor.

UNIRL=PATH python -m pytest -m real_loops tests/integrations/test_unirl.py

The records are of UniRL's own types, from its source tree; a plain sampling loop fills them.
"""

import os
import sys

import pytest
import torch
from instruments.doctor.plain_loop import PROMPTS, Loop

from flowcorr import dumps
from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.doctor import examine_dump
from tests.examples.scripts import load
from tests.shallow import SHALLOW

pytestmark = pytest.mark.real_loops

FAULTS = {
    None: set(),
    "wrong_shift": {"wrong_shift"},
    "swapped_images": {"swapped_images"},
    "stale_prompts": {"wrong_prompt"},
    "decoder_unscaled": {"decoder_unscaled"},
}


@pytest.fixture
def examples(monkeypatch):
    if "UNIRL" not in os.environ:
        pytest.fail("this test needs the path of a source tree of UniRL in UNIRL")
    monkeypatch.syspath_prepend(os.environ["UNIRL"])
    yield load("dump_log_probs")
    for name in [name for name in sys.modules if name.split(".")[0] == "unirl"]:
        monkeypatch.delitem(sys.modules, name)


def record(captured, *, window_alone=False):
    """A request and a track of UniRL, with the latents of the window, and the first and last ones."""
    from unirl.types.conditions import ImageLatentCondition
    from unirl.types.primitives import Images, Texts
    from unirl.types.rollout_req import RolloutReq
    from unirl.types.sampling import DiffusionSamplingParams
    from unirl.types.segments.latent import make_image_segment

    steps, last = captured["step_indices"], len(captured["timesteps"])
    names = [f"prompt {place}" for place in range(len(PROMPTS) // 2)]
    latents = {} if window_alone else {0: captured["initial_noise"], last: captured["final_latents"]}
    for place, step in enumerate(steps):
        latents |= {step: captured["latents"][:, place], step + 1: captured["next_latents"][:, place]}
    positions = sorted(latents)
    request = RolloutReq(
        sample_ids=list(PROMPTS),
        primitives={"text": Texts(texts=list(PROMPTS))},
        request_conditions={"initial_latents": ImageLatentCondition(latents=captured["initial_noise"])},
        sampling_params=DiffusionSamplingParams(
            num_inference_steps=last,
            guidance_scale=captured["guidance_scale"],
            eta=captured["noise_level"],
            max_sequence_length=captured["max_sequence_length"],
            autocast_precision="fp32",
        ),
    )
    track = request.make_root_track("image", branch=1)
    track.parent_ids = [name for name in names for _ in range(2)]
    track.segment = make_image_segment(
        latents=torch.stack([latents[position] for position in positions], 1),
        indices=torch.tensor(positions),
        sigmas=captured["sigmas"],
        sde_logp=captured["log_probs"],
        sde_indices=torch.tensor(steps),
    )
    track.decoded = Images(pixels=captured["images"])
    track.rewards = captured["rewards"]
    return request, track.compute_advantages(normalize=True, use_global_std=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_of_unirl_is_judged(fault, examples, tmp_path):
    captured = Loop(fault, window="middle").sample()
    request, track = record(captured)
    replay = examples.capture_unirl(
        request, track, adapter=captured["adapter"], adapter_alpha=captured["adapter_alpha"]
    )
    old = track.segment.sde_logp + 1e-6
    metrics = examples.dump_unirl(tmp_path, 3, track, old, 1e-4, replay)
    assert metrics["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(1e-6, rel=0.1)
    assert dumps.load(dumps.files(tmp_path)[3]).step_indices.tolist() == [[1, 3]] * len(PROMPTS)
    assert audit_folder(tmp_path).fact("num_samples") == len(PROMPTS)
    report = examine_dump(tmp_path, SHALLOW)
    assert set(report.causes()) == FAULTS[fault]


def test_a_record_of_the_window_alone(examples, tmp_path):
    """As UniRL stores it: the noise follows from its recipe, and the last latents are missing."""
    captured = Loop(window="middle").sample()
    request, track = record(captured, window_alone=True)
    replay = examples.capture_unirl(request, track, adapter=captured["adapter"], adapter_alpha=8.0)
    assert torch.equal(replay.initial_noise, captured["initial_noise"][:4])
    assert any(line.startswith("not captured: final_latents") for line in replay.missing())
    examples.dump_unirl(tmp_path, 3, track, track.segment.sde_logp, 1e-4, replay)
    assert examine_dump(tmp_path, SHALLOW).causes == []
