import pytest

from flowcorr.actor.passes import Passes, is_bounded, passes_of

MINI_BATCH, STEPS = 12, 3
WHOLE = {"ratio_level": "trajectory_mean"}


def passes(make_config, rows, **actor):
    config = make_config(
        actor={"mini_batches": 2, **actor},
        sampling={"num_inference_steps": 5, "sde_window_size": STEPS, "sde_window_range": (0, 4)},
        rollout={"prompts_per_step": 4, "n": 6},
    )
    assert config.mini_batch_size == MINI_BATCH
    return passes_of(config, rows)


@pytest.mark.parametrize(
    ("rows", "samples", "folded"),
    [
        (None, 12, True),
        (36, 12, True),
        (35, 6, True),  # two passes, as alike as they can be
        (13, 4, True),  # three passes, as twelve samples step by step take
        (12, 4, True),
        (5, 4, False),  # nine passes, and twelve of one sample each
        (3, 1, True),
        (2, 2, False),
        (1, 1, False),
    ],
)
def test_auto_takes_the_fewest_passes_within_the_bound(make_config, rows, samples, folded):
    assert passes(make_config, rows) == Passes(samples=samples, folded=folded)


@pytest.mark.parametrize(("rows", "samples", "folded"), [(36, 12, True), (11, 3, True), (2, 1, False)])
def test_a_loss_of_whole_windows_holds_the_graph_of_all_steps(make_config, rows, samples, folded):
    assert passes(make_config, rows, **WHOLE) == Passes(samples=samples, folded=folded)
    assert passes(make_config, rows, **WHOLE, fold_steps=False) == Passes(samples=samples, folded=False)


@pytest.mark.parametrize("rows", [None, 1, 11, 36])
def test_explicit_keys_stand(make_config, rows):
    def explicit(**actor):
        return passes(make_config, rows, **actor)

    for folded in (True, False):
        assert explicit(micro_batch_size=None, fold_steps=folded) == Passes(samples=12, folded=folded)
        assert explicit(micro_batch_size=5, fold_steps=folded) == Passes(samples=5, folded=folded)
        assert explicit(fold_steps=folded).folded is folded
    assert explicit(micro_batch_size=5).samples == 5


@pytest.mark.parametrize(
    ("rows", "actor", "expected"),
    [
        (11, {"fold_steps": True}, Passes(samples=3, folded=True)),
        (11, {"fold_steps": False}, Passes(samples=6, folded=False)),
        (15, {"micro_batch_size": 5}, Passes(samples=5, folded=True)),
        (14, {"micro_batch_size": 5}, Passes(samples=5, folded=False)),
        (14, {"micro_batch_size": None}, Passes(samples=12, folded=False)),
    ],
)
def test_one_explicit_key_bounds_the_other(make_config, rows, actor, expected):
    assert passes(make_config, rows, **actor) == expected


def test_only_auto_needs_a_bound(make_config):
    def bounded(**actor):
        return is_bounded(make_config(actor=actor).actor)

    assert bounded()
    assert bounded(fold_steps=True)
    assert bounded(micro_batch_size=None)
    assert not bounded(micro_batch_size=None, fold_steps=True)
