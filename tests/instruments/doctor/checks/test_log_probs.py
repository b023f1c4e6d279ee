import pytest
import torch
from instruments.doctor.faults import assert_named, check, finding_of, nudged, of_another_sample, unscaled

import flowcorr
from flowcorr import dumps
from flowcorr.instruments.doctor.checks.log_probs import check_captured_log_probs
from tests.planted.mistakes import without_normaliser
from tests.planted.plants import returning, rounded

FAULTS = {
    "summed": ({"log_probs": lambda rollout: 512 * rollout.log_probs}, "sums"),
    "without normaliser": ({"log_probs": without_normaliser}, "means without - log s - log(2 pi) / 2"),
    "without scale": ({"log_probs": unscaled}, "means without 1 / (2 s^2)"),
    "rounded to bfloat16": ({"log_probs": lambda rollout: rounded(rollout.log_probs)}, "rounded to bfloat16"),
    "of another sample": ({"log_probs": of_another_sample}, None),
    "off by a constant": ({"log_probs": lambda rollout: rollout.log_probs + 1e-3}, None),
    "of latents that moved afterwards": ({"next_latents": nudged(1e-3)}, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_log_probs(recorded, fault):
    changes, convention = FAULTS[fault]
    returning(**changes)(recorded.engine)
    assert_named(check(recorded, recorded.engine), "log_probs", convention=convention)


def test_step_means_of_another_step(recorded):
    returning(means=lambda rollout: rollout.window.means.roll(1, 1))(recorded.engine)
    report = check(recorded, recorded.engine)
    assert_named(report, "bookkeeping")
    assert finding_of(report, "log_probs").level == "healthy"


def test_squared_distances_are_judged_in_their_own_unit(small_run):
    """Else a gap between means alone would look as if other latents had been scored."""
    found = {}
    for squared in (False, True):
        sampling = {"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": squared}
        run = small_run(rollout={"emulate": "int4"}, sampling=sampling)
        found[squared] = finding_of(check(run, run.engine), "bookkeeping")
    assert found[True].level == found[False].level == "healthy"
    # Not quite equal, as less is put down to the rounding of log-probs in the one case.
    assert found[True].numbers["value"] == pytest.approx(found[False].numbers["value"], rel=0.25)


# Captured samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "normaliser", "level", "cause"),
    [(1, False, "healthy", ""), ("D", True, "serious", "log_probs_summed")],
)
def test_conventions_of_captured_log_probs(scale, normaliser, level, cause, captured_of):
    expected = captured_of()
    assert check_captured_log_probs(expected) is None
    window = expected.legs.window
    elements = window.noise[0, 0].numel()
    values = -window.square / 2
    if normaliser:
        values = values - window.std.log() - 0.9189385332046727
    values = values * (elements if scale == "D" else 1)
    found = check_captured_log_probs(captured_of(log_probs=torch.cat([values, values])))
    assert (found.level, found.cause) == (level, cause)


@pytest.mark.parametrize(("both", "level"), [(True, "healthy"), (False, "serious")])
def test_a_normaliser_that_one_side_lacks_cancels_in_no_ratio(both, level, captured_of, tmp_path):
    window = captured_of().legs.window
    plain = (-window.square / 2).repeat(8, 1)
    trainer = plain if both else plain - window.std.log().repeat(8, 1) - 0.9189385332046727
    flowcorr.dump(
        tmp_path, 0, rollout_log_probs=plain, old_log_probs=trainer, advantages=plain[:, 0], num_elements=512
    )
    given = torch.cat([plain[: len(window.square)]] * 2)
    found = check_captured_log_probs(captured_of(log_probs=given, terms=dumps.files(tmp_path)))
    assert (found.level, found.cause) == (level, "" if both else "log_probs_normaliser")
