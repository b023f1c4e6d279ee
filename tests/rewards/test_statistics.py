"""Statistics of images, by hand-made ones."""

import numpy as np
import pytest

from flowcorr.metrics import Metrics
from flowcorr.rewards import RewardOutput
from flowcorr.rewards.statistics import PER_GROUP, diversity, image_metrics, image_statistics, reward_metrics


def flat(*levels):
    """An image of one grey level each."""
    return np.stack([np.full((4, 8, 3), level, dtype=np.uint8) for level in levels])


def halves():
    """The left half black, the right half pure red."""
    image = np.zeros((1, 4, 8, 3), dtype=np.uint8)
    image[:, :, 4:, 0] = 255
    return image


def test_flat_images_have_no_contrast():
    values = image_statistics(flat(0, 50, 52, 255))
    assert values["dark"].tolist() == [1, 1, 0, 0]
    assert values["saturated"].tolist() == [0, 0, 0, 1]
    assert values["contrast"] == pytest.approx(np.zeros(4), abs=1e-6)
    assert values["sharpness"] == pytest.approx(np.zeros(4), abs=1e-6)


def test_an_edge():
    values = {name: value.item() for name, value in image_statistics(halves()).items()}
    assert (values["dark"], values["saturated"]) == (0.5, 0.5)
    assert values["contrast"] == pytest.approx(0.299 / 2)
    assert values["sharpness"] == pytest.approx(0.299 / 7 / 2)  # one of seven differences across, none down


def test_noise_is_larger_as_a_file_than_a_flat_image():
    noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    sizes = [image_statistics(images)["bits_per_pixel"].item() for images in (noise, np.zeros_like(noise))]
    assert sizes[0] > 5 * sizes[1]


def test_diversity_is_within_groups():
    images = np.concatenate([flat(10, 10), flat(0, 255)])
    assert diversity(images, np.array([3, 3, 7, 7])) == pytest.approx([0, 0.5])


def test_metrics_are_of_the_first_images_of_each_group():
    images = np.concatenate([flat(*[0] * PER_GROUP, 255, 255), flat(*[0, 255] * 3)])
    groups = np.repeat([0, 1], PER_GROUP + 2)
    values = Metrics(image_metrics(images, groups, np.ones(len(images), dtype=bool))).compute()
    assert values["reward/image/dark"] == pytest.approx((1 + 0.5) / 2)
    assert values["reward/image/diversity"] == pytest.approx((0 + 0.5) / 2)
    assert set(values) == {
        f"reward/image/{name}"
        for name in ("dark", "saturated", "contrast", "sharpness", "bits_per_pixel", "diversity")
    }


def test_samples_without_a_picture_are_not_measured():
    images, groups = flat(0, 0, 255, 255), np.array([0, 0, 1, 1])
    values = Metrics(image_metrics(images, groups, np.array([True, True, False, False]))).compute()
    assert values["reward/image/dark"] == 1
    assert not Metrics(image_metrics(images, groups, np.zeros(4, dtype=bool))).compute()


def test_a_video_has_the_mean_of_its_frames():
    videos = np.stack([flat(0, 100, 200), flat(100, 100, 100)])
    values = image_statistics(videos)
    assert values["dark"] == pytest.approx([1 / 3, 0])
    by_frame = image_statistics(videos[0])
    assert values["bits_per_pixel"][0] == pytest.approx(by_frame["bits_per_pixel"].mean())
    assert diversity(videos, np.array([0, 0])) == pytest.approx([100 / 255 / 3])  # stds 50, 0 and 50 of 255
    assert "motion" not in by_frame


def test_a_video_that_stands_still_has_no_motion():
    values = image_statistics(np.stack([flat(0, 51, 0), flat(9, 9, 9)]))
    assert values["motion"] == pytest.approx([0.2, 0])
    assert "motion" not in image_statistics(np.stack([flat(5)]))  # one frame has no neighbour


def test_reward_metrics_are_of_the_scored_samples():
    scored = RewardOutput(
        scores=np.array([1.0, 3.0, np.nan, 2.0, 4.0, 4.0]),
        extra={"exact_match": np.array([0.0, 1.0, np.nan, 1.0, 1.0, 1.0]), "none": np.full(6, np.nan)},
    )
    values = Metrics(reward_metrics(scored, np.array([0, 0, 1, 1, 2, 2]))).compute()
    assert values == {
        "reward/failed_samples": 1,
        "reward/mean": pytest.approx(14 / 5),
        "reward/std": pytest.approx(np.std([1, 3, 2, 4, 4], ddof=1)),
        "reward/min": 1,
        "reward/max": 4,
        "reward/exact_match": pytest.approx(4 / 5),
        "reward/zero_std_group_fraction": pytest.approx(2 / 3),
    }
