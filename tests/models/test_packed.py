"""Latents in patches, and the places of their tokens; tests of all families are in `test_families.py`."""

import torch

from flowcorr.models.packed import PackedFamily, positions


def test_packed_latents_are_the_grid_of_their_patches():
    channels, rows, columns = 3, 2, 4
    image = torch.arange(channels * 4.0 * rows * columns).view(1, channels, 2 * rows, 2 * columns)
    patches = image.view(1, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    packed = patches.reshape(1, rows, columns, -1)
    assert torch.equal(PackedFamily.unpack(packed), image)
    assert torch.equal(PackedFamily.pack(image), packed)


def test_places_run_along_the_rows():
    places = positions(2, 3, device=torch.device("cpu"))
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
