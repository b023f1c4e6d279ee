import pytest
from instruments.doctor.faults import WHOLE, check, finding_of

from flowcorr.instruments.gap_table import ABS_DELTA
from flowcorr.instruments.page import exit_code


def test_a_gap_above_the_clip_warns_in_bypass(small_run):
    from flowcorr.correction import RolloutCorrectionConfig

    bypass = {"rollout_correction": RolloutCorrectionConfig.from_preset("bypass_ppo_clip")}
    run = small_run(rollout={"emulate": "fp8"}, algorithm=bypass, actor={"clip_ratio": 1e-5})
    report = check(run, run.engine, float32=False)
    assert report.causes("warning") == ["clip"]
    assert finding_of(report, "clip").numbers["value"] > 0.9
    wide = small_run(rollout={"emulate": "fp8"}, algorithm=bypass, actor={"clip_ratio": 0.2})
    assert exit_code(check(wide, wide.engine, float32=False)) == 0


def test_a_gap_above_the_clip_is_healthy_where_the_mode_follows_the_noise(small_run):
    from flowcorr.correction import RolloutCorrectionConfig

    auto = {"rollout_correction": RolloutCorrectionConfig(bypass_mode="auto")}
    run = small_run(rollout={"emulate": "fp8"}, algorithm=auto, actor={"clip_ratio": 1e-5})
    assert exit_code(check(run, run.engine, float32=False)) == 0


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "importance_cap", "flow_dppo"])
def test_the_clip_is_judged_on_the_ratio_that_the_loss_uses(small_run, loss_mode):
    """grpo_guard takes the mean of the drift off, and multiplies by s."""
    from flowcorr.correction import RolloutCorrectionConfig

    bypass = {"rollout_correction": RolloutCorrectionConfig.from_preset("bypass_ppo_clip")}
    limit = 0.003
    actor = {"clip_ratio": limit, "importance_cap": 1 + limit, "loss_mode": loss_mode}
    run = small_run(model=WHOLE, rollout={"emulate": "int4"}, algorithm=bypass, actor=actor)
    found = finding_of(check(run, run.engine, float32=False), "clip")
    if loss_mode == "flow_dppo":
        assert not found.numbers
        return
    rollout = run.engine.sample(run.conditioning, range(2), training_step=0, with_means=True)
    scores = run.actor.log_probs(rollout, with_means=True)
    log_ratio = (scores.log_probs - rollout.log_probs).double()
    if loss_mode == "grpo_guard":
        r_squared = (scores.means - rollout.window.means).square().flatten(2).mean(
            -1
        ) / rollout.window.stds.square()
        log_ratio = (log_ratio + r_squared / 2) * rollout.window.stds
    expected = (log_ratio.expm1().abs() > limit).double().mean().item()
    assert 0 < expected < 1
    assert found.numbers["value"] == pytest.approx(expected)
    key, value = ("importance_cap", 1 + limit) if loss_mode == "importance_cap" else ("clip_ratio", limit)
    assert found.numbers[f"actor.{key}"] == str(value)


@pytest.mark.parametrize("clip", [1e-4, (1e-4, 5e-4)])
def test_noise_floor_by_hand(small_run, clip):
    run = small_run(rollout={"emulate": "int8"}, actor={"clip_ratio": clip})
    report = check(run, run.engine, float32=False)
    rollout = run.engine.sample(run.conditioning, range(2), training_step=0, with_means=True)
    scores = run.actor.log_probs(rollout, with_means=True)
    delta = (scores.log_probs - rollout.log_probs).double()
    delta, off = delta.abs(), delta.expm1().abs()
    r_squared = (scores.means - rollout.window.means).square().flatten(2).mean(
        -1
    ) / rollout.window.stds.square()
    rows = report.table("noise_floor")
    assert [row["step_index"] for row in rows] == [0, 1]
    for place, row in enumerate(rows):
        quantiles = [row[name] for name in ABS_DELTA]
        assert row["sigma"] == pytest.approx(rollout.window.sigmas[0, place].item())
        assert quantiles[0] == pytest.approx(delta[:, place].quantile(0.5).item())
        assert quantiles == sorted(quantiles)
        assert row["exact_kl"] == pytest.approx(r_squared[:, place].mean().item() / 2)
        limit = clip[place] if isinstance(clip, tuple) else clip
        assert row["outside_clip"] == pytest.approx((off[:, place] > limit).double().mean().item())
    assert report.fact("num_elements") == 4 * 8 * 16
