import copy

import pytest
import torch
from instruments.doctor.faults import (
    assert_named,
    check,
    finding_of,
    no_vae_scaling,
    separate,
    vae_scaling_off,
)

from flowcorr.instruments.doctor.checks.images import check_captured_images, find_exchanged
from tests.overflow import overflow
from tests.planted.mistakes import exchanged
from tests.planted.plants import another_vae, returning

FAULTS = {
    "another VAE": another_vae(0.5),
    "no scaling": no_vae_scaling,
    "scaling a quarter too large": vae_scaling_off(1.25),
    "scaling a quarter too small": vae_scaling_off(0.75),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_decoder(small_run, fault):
    run = small_run()
    engine = separate(run)
    FAULTS[fault](engine)
    assert_named(check(run, engine), "images")


def test_exchanged_images(recorded):
    returning(images=exchanged)(recorded.engine)
    assert_named(check(recorded, recorded.engine), "images", sample=0, has_image_of=1)


def test_one_wrong_image_among_right_ones(recorded):
    def darker(rollout):
        images = rollout.images.clone()
        images[-1] -= images[-1] // 8
        return images

    returning(images=darker)(recorded.engine)
    report = check(recorded, recorded.engine)
    assert_named(report, "images")
    assert "has_image_of" not in finding_of(report, "images").numbers


def test_images_of_another_size(recorded):
    returning(images=lambda rollout: rollout.images[:, ::2])(recorded.engine)
    assert_named(check(recorded, recorded.engine), "images", engine_shape=[16, 64, 3])


def test_an_engine_that_does_not_say_that_its_decoder_overflows(small_run):
    run = small_run()
    run.family.pipeline.vae = copy.deepcopy(run.family.pipeline.vae)  # runs share it
    overflow(run.family.pipeline.vae)
    returning(finite_images=lambda rollout: None)(run.engine)
    report = check(run, run.engine)
    assert_named(report, "images", images=4, not_finite=4)
    assert "dtype" not in finding_of(report, "images").remedy  # it decodes in float32, which has room


def gaps_of(own, among, elsewhere):
    """Distances of eight images in two groups, whose members are alike: `own`, within a group, to the other group."""
    gaps = torch.full((8, 8), elsewhere)
    gaps[:4, :4] = gaps[4:, 4:] = among
    return gaps.fill_diagonal_(own)


@pytest.mark.parametrize("own", [0.0, 2.0])
def test_an_exchanged_image_is_as_close_to_its_sample_as_others_are(own):
    right = gaps_of(own, among=12.0, elsewhere=70.0)
    assert find_exchanged(right) is None
    assert find_exchanged(right[[0, 1, 2, 7, 4, 5, 6, 3]]) == (3, 7)  # two exchanged
    assert find_exchanged(right[[1, 1, 2, 3, 4, 5, 6, 7]]) == (0, 1)  # one twice
    assert find_exchanged(right.roll(1, 0)) is not None  # each that of the sample before


def test_an_image_that_went_another_way_is_not_exchanged():
    gaps = gaps_of(2.0, among=12.0, elsewhere=70.0)
    gaps[4, 4] = 44.0  # as far from its own as from those of its group's other way
    assert find_exchanged(gaps) is None


# Captured samples ------------------------------------------------------------------------------------------


def test_images_in_order(captured_of):
    assert check_captured_images(captured_of()).level == "healthy"


def test_all_of_a_batch_swapped_is_certain(captured_of, captured):
    images = captured["images"].clone()
    images[:4] = images[:4].roll(1, 0)
    found = check_captured_images(captured_of(images=images))
    assert (found.cause, found.numbers["confidence"]) == ("swapped_images", "certain")


def test_one_image_of_many(captured_of, captured):
    images = captured["images"].clone()
    images[2] = images[0]
    found = check_captured_images(captured_of(images=images))
    assert (found.cause, found.numbers["confidence"]) == ("swapped_images", "certain")
    assert [value > 1 for value in found.numbers["samples"]] == [False, False, True, False]


def test_upside_down(captured_of, captured):
    found = check_captured_images(captured_of(images=captured["images"].flip(2)))
    assert found.cause == "flipped_images"


def test_a_decoder_that_rounds_more_than_most_is_not_accused(captured_of, captured):
    brighter = {"images": (captured["images"] + 2.5 / 255).clamp(0, 1), "dtype": "bfloat16"}
    assert check_captured_images(captured_of(**brighter)).cause == "images_changed"
    samples = captured_of(**brighter)
    vae = samples.stack.family.pipeline.vae
    decode = vae.decode

    def coarse(latents, **options):
        (pixels,) = decode(latents.float(), **options)
        return (pixels + 5 / 255 * (latents.dtype == torch.bfloat16),)

    vae.decode = coarse
    assert check_captured_images(samples).level == "healthy"


def test_images_that_are_alike_cannot_be_told(captured_of, captured):
    same = {
        name: captured[name][:1].expand(8, *captured[name].shape[1:]) for name in ("images", "final_latents")
    }
    found = check_captured_images(captured_of(**same))
    assert found.level == "note"
    assert max(found.numbers["samples"]) <= 1  # each also fits its own latents


def test_images_that_no_cause_explains(captured_of, captured):
    assert check_captured_images(captured_of(images=torch.zeros_like(captured["images"]))).level == "warning"
