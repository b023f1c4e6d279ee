import pytest
from diagnostics.doctor.faults import assert_named, check, no_vae_scaling, separate, vae_scaling_off

from flowcorr.diagnostics.doctor.mistakes import exchanged
from flowcorr.diagnostics.doctor.plants import another_vae, returning

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
    assert_named(check(run, engine), "images", "images differ by up to")


def test_exchanged_images(recorded):
    returning(images=exchanged)(recorded.engine)
    assert_named(check(recorded, recorded.engine), "images", "sample 0 has the image of sample 1")


def test_one_wrong_image_among_right_ones(recorded):
    def darker(rollout):
        images = rollout.images.clone()
        images[-1] -= images[-1] // 8
        return images

    returning(images=darker)(recorded.engine)
    assert_named(check(recorded, recorded.engine), "images", "images differ by up to")


def test_images_of_another_size(recorded):
    returning(images=lambda rollout: rollout.images[:, ::2])(recorded.engine)
    assert_named(check(recorded, recorded.engine), "images", "images are [16, 64, 3] in the engine")
