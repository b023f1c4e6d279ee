"""Numbers of images beside those that are decoded of their latents: the size of each change."""

import pytest
import torch

from flowcorr.questions.images import image_gaps, image_residuals


def drawn(*shape):
    return torch.randint(64, 192, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_a_gap_is_the_mean_difference_of_an_image():
    images = drawn(3, 4, 4, 3)
    moved = images.clone()
    moved[1] += 2
    assert image_gaps(moved, images).tolist() == [0, 2, 0]
    assert image_gaps(images[1], images).argmin() == 1  # one image beside all


@pytest.mark.parametrize("shape", [(1, 16, 16, 3), (1, 2, 16, 16, 3)])
@pytest.mark.parametrize(
    ("change", "name", "size"),
    [
        (lambda pixels: pixels + 2, "image_level", 2.0),
        (lambda pixels: 1.05 * (pixels - pixels.mean((*range(pixels.dim() - 1),))), "image_contrast", 0.05),
        (lambda pixels: pixels.flip(-1), "image_channels", 1.0),
    ],
)
def test_a_residual_is_the_size_of_its_change(shape, change, name, size):
    decoded = drawn(*shape)
    frames = decoded.float()
    residuals = image_residuals(change(frames), decoded)
    assert residuals[name].flatten().tolist() == pytest.approx([size] * residuals[name].numel(), rel=1e-3)
    assert set(image_residuals(frames, decoded)) == {
        f"image_{part}" for part in ("error", "level", "contrast", "detail", "channels")
    }


def test_an_image_without_a_change_leaves_none():
    decoded = drawn(1, 16, 16, 3)
    for values in image_residuals(decoded, decoded).values():
        assert values.abs().max() == 0
