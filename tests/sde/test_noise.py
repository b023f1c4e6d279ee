import random

import numpy as np
import pytest
import torch

from flowcorr.errors import BatchError
from flowcorr.sde import generator, initial_noise, sample_noise, seed_globals, stable_seed, step_noise

SHAPE = (4, 3, 3)
GROUPS, MEMBERS = [0, 0, 1, 1, 7], [0, 1, 0, 1, 0]
STEP = {"seed": 3, "training_step": 2}


def test_noise_belongs_to_the_sample_and_not_to_the_batch():
    whole = initial_noise(SHAPE, GROUPS, MEMBERS, **STEP)
    assert whole.shape == (5, *SHAPE)
    assert whole.dtype == torch.float32
    for i in range(5):
        assert torch.equal(
            whole[i : i + 1], initial_noise(SHAPE, GROUPS[i : i + 1], MEMBERS[i : i + 1], **STEP)
        )


def test_every_part_of_the_identity_changes_the_noise():
    base = sample_noise(SHAPE, [1], [2], seed=3, training_step=4, stream="initial")
    others = [
        sample_noise(SHAPE, [2], [2], seed=3, training_step=4, stream="initial"),
        sample_noise(SHAPE, [1], [3], seed=3, training_step=4, stream="initial"),
        sample_noise(SHAPE, [1], [2], seed=4, training_step=4, stream="initial"),
        sample_noise(SHAPE, [1], [2], seed=3, training_step=5, stream="initial"),
        sample_noise(SHAPE, [1], [2], seed=3, training_step=4, stream="step 0"),
        sample_noise(SHAPE, [2], [1], seed=3, training_step=4, stream="initial"),
    ]
    distinct = torch.stack([base, *others]).flatten(1).unique(dim=0)
    assert len(distinct) == 7


def test_steps_have_noise_of_their_own():
    first, second = (step_noise(SHAPE, GROUPS, MEMBERS, **STEP, step_index=i) for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, initial_noise(SHAPE, GROUPS, MEMBERS, **STEP))


def test_a_group_can_share_its_initial_noise():
    noise = initial_noise(SHAPE, GROUPS, MEMBERS, **STEP, same_in_group=True)
    assert torch.equal(noise[0], noise[1])
    assert torch.equal(noise[2], noise[3])
    assert not torch.equal(noise[0], noise[2])


def test_noise_is_standard_normal():
    noise = initial_noise((1000,), list(range(20)), [0] * 20, **STEP)
    assert noise.mean().item() == pytest.approx(0.0, abs=4 / 20000**0.5)
    assert noise.std().item() == pytest.approx(1.0, abs=4 / 40000**0.5)


def test_noise_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    initial_noise(SHAPE, GROUPS, MEMBERS, **STEP)
    assert torch.equal(state, torch.get_rng_state())


def test_own_code_draws_the_same_numbers_again():
    drawn = []
    for step in (1, 2, 1):
        seed_globals(0, "step", step)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_seeds_never_change():
    """Another number here means that no earlier run can be resumed or repeated."""
    assert stable_seed(1, "a") == 2461651067226055738
    assert stable_seed(1, 11) != stable_seed(11, 1)


def test_generator_takes_tensor_scalars_as_numbers():
    plain, scalar = generator(1, 2, 3, 4), generator(1, 2, torch.tensor(3), torch.tensor(4))
    assert plain.initial_seed() == scalar.initial_seed()


def test_each_sample_needs_group_and_member():
    with pytest.raises(BatchError, match="^5 groups .* 1 members "):
        initial_noise(SHAPE, GROUPS, [0], **STEP)
