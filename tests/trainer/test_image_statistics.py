"""Statistics of images, by hand-made ones."""

import numpy as np
import pytest

from flowcorr.trainer.image_statistics import PER_GROUP, diversity, image_metrics, image_statistics


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
    values = image_metrics(images, np.repeat([0, 1], PER_GROUP + 2)).compute()
    assert values["reward/image/dark"] == pytest.approx((1 + 0.5) / 2)
    assert values["reward/image/diversity"] == pytest.approx((0 + 0.5) / 2)
    assert set(values) == {
        f"reward/image/{name}"
        for name in ("dark", "saturated", "contrast", "sharpness", "bits_per_pixel", "diversity")
    }
