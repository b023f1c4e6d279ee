"""Memory of decoding and scoring videos: beside the videos themselves, it does not grow with their number."""

import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from tiny_pipelines import PIPELINES
from torch.utils._python_dispatch import TorchDispatchMode

from flowcorr.config import ModelConfig, RewardTerm
from flowcorr.models import load_family
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward
from flowcorr.rewards.statistics import image_metrics
from flowcorr.rollout.sampler import decode

FRAMES, SIDE = 9, 64
VIDEO = FRAMES * SIDE * SIDE * 3  # bytes of one as uint8


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages of all tensors that operations made and that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        parts = made if isinstance(made, (tuple, list)) else [made]
        for part in parts:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                self.storages[id(part)] = (storage.data_ptr(), storage.nbytes())
                weakref.finalize(part, self.storages.pop, id(part), None)
        self.peak = max(self.peak, sum(nbytes for _, nbytes in set(self.storages.values())))
        return made


class Family:
    """Its decoder makes float pixels from one number a video."""

    def decode(self, latents):
        return torch.zeros(len(latents), 3, FRAMES, SIDE, SIDE) + latents.mean((1, 2, 3, 4)).view(
            -1, 1, 1, 1, 1
        )


@torch.no_grad()
def test_decoding_needs_as_much_for_many_videos_as_for_few():
    peaks = {}
    for count in (2, 12):
        latents = torch.rand(count, 16, 3, 64, 64)  # so many elements that they are decoded one by one
        with LiveBytes() as live:
            videos, _ = decode(Family(), latents)
        assert videos.numel() == count * VIDEO
        peaks[count] = live.peak - videos.nbytes - latents.nbytes  # which its slices share
    assert peaks[12] <= 1.1 * peaks[2]
    pixels = 4 * VIDEO  # of one video in float32: the decoder holds it twice, while it adds
    assert peaks[12] <= 2.2 * pixels + VIDEO


@pytest.mark.parametrize("name", ["wan", "wan22_ti2v"])
@torch.no_grad()
def test_a_decoded_video_is_in_memory_once_in_floating_point(name, tmp_path):
    """What the decoder computes from one latent frame does not grow with their number; its pixels do."""
    family, peaks = load_family(ModelConfig(path=str(PIPELINES[name].build(tmp_path)))), {}
    for num_frames in (33, 65):
        latents = torch.zeros(1, *family.sample_shape(*PIPELINES[name].size, num_frames))
        with LiveBytes() as live:
            videos, _ = decode(family, latents)
        peaks[num_frames] = live.peak
    height, width = PIPELINES[name].size
    values = 32 * height * width * 3  # of the other 32 frames
    assert peaks[65] - peaks[33] <= 1.1 * values * 4 + 2 * values  # float32, and its uint8 in two places


def brightness(images, prompts):
    """A reward of the user's own, which states nothing about itself."""
    return images.mean((1, 2, 3))


def video_brightness(videos, prompts):
    """As `brightness`, of whole videos."""
    return videos.mean((1, 2, 3, 4))


video_brightness.takes_videos = True


@pytest.mark.parametrize("rule", ["middle", "mean"])
@pytest.mark.parametrize(
    "name", ["jpeg_incompressibility", f"{__name__}:brightness", f"{__name__}:video_brightness"]
)
def test_scoring_needs_as_much_for_many_videos_as_for_few(name, rule):
    reward, peaks = build_reward([RewardTerm(name=name, frames=rule)]), {}
    for count in (8, 64):
        videos = np.zeros((count, FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
        prompts = [Prompt(text="a cat")] * count
        reward(videos[:4], prompts[:4])  # imports
        tracemalloc.start()
        reward(videos, prompts)
        image_metrics(videos, np.repeat(np.arange(2), count // 2), np.ones(count, dtype=bool))
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[64] <= peaks[8] + 4 * VIDEO / FRAMES  # numbers of 56 more samples
    assert peaks[64] <= 5 * VIDEO  # four of a prompt at a time
