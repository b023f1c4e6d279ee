from dataclasses import replace

import pytest

from flowcorr import sde
from flowcorr.errors import BatchError
from flowcorr.records import Prompt
from flowcorr.trainer.collect import check_latents, noise_metrics


@pytest.mark.parametrize(
    "sampling", [{}, {"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": True}, {"sde_type": "dance_sde"}]
)
def test_noise_of_a_healthy_rollout(make_run, sampling):
    run = make_run(sampling=sampling)
    rollout = run.sample()
    values = noise_metrics(rollout, run.config.sampling).compute()
    elements = rollout.window.means.numel()
    assert values["rollout/noise_std"] == pytest.approx(1.0, abs=5 / (2 * elements) ** 0.5)
    assert values["rollout/noise_mean"] == pytest.approx(0.0, abs=5 / elements**0.5)
    assert values["rollout/noise_shared_by"] == pytest.approx(1.0, abs=5 * (2 / rollout.num_elements) ** 0.5)
    noise = (rollout.window.next_latents - rollout.window.means) / rollout.window.stds[..., None, None, None]
    assert values["rollout/noise_std"] == pytest.approx(
        (noise.double().square().sum() / (elements - 1)).sqrt().item(), rel=1e-4
    )
    assert values["rollout/noise_mean"] == pytest.approx(noise.double().mean().item(), abs=1e-6)


def test_the_std_needs_no_step_means(make_run):
    run = make_run()
    rollout = run.sample()
    with_means = noise_metrics(rollout, run.config.sampling).compute()
    without = replace(rollout, window=replace(rollout.window, means=None))
    values = noise_metrics(without, run.config.sampling).compute()
    assert values == {"rollout/noise_std": with_means["rollout/noise_std"]}
    neither = replace(rollout, window=replace(rollout.window, means=None, stds=None))
    assert noise_metrics(neither, run.config.sampling).compute() == {}


@pytest.mark.parametrize(
    ("fault", "metric", "expected"),
    [
        (lambda noise: 1.05 * noise, "rollout/noise_std", 1.05),
        (lambda noise: 0 * noise, "rollout/noise_std", 0.0),
        (lambda noise: noise + 0.1, "rollout/noise_mean", 0.1),
    ],
)
def test_other_noise(make_run, monkeypatch, fault, metric, expected):
    run = make_run(rollout={"n": 8})
    true = sde.step_noise
    monkeypatch.setattr(sde, "step_noise", lambda *args, **kwargs: fault(true(*args, **kwargs)))
    assert noise_metrics(run.sample(), run.config.sampling).compute()[metric] == pytest.approx(
        expected, abs=0.05
    )


@pytest.mark.parametrize(("same", "sharing"), [("member", 4), ("step_index", 2)])
def test_noise_that_is_shared(make_run, monkeypatch, same, sharing):
    """By the four images of a prompt, or by the two steps of a sample."""
    run, true = make_run(), sde.step_noise

    def shared(shape, groups, members, *, step_index, **kwargs):
        members = [0] * len(members) if same == "member" else members
        return true(shape, groups, members, step_index=0 if same == "step_index" else step_index, **kwargs)

    monkeypatch.setattr(sde, "step_noise", shared)
    values = noise_metrics(run.sample(), run.config.sampling).compute()
    assert values["rollout/noise_shared_by"] == pytest.approx(sharing, rel=0.3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_named(make_run, bad):
    rollout = make_run().sample()
    prompts = [Prompt(text=text) for text in ("ab", "cd") for _ in range(4)]
    check_latents(rollout, prompts)
    rollout.window.latents[5, 1, 0, 0, 0] = rollout.window.next_latents[7, 1, 0, 0, 0] = bad
    with pytest.raises(BatchError, match=r"sample 5 \(prompt 'cd'\), 2 of 8 samples"):
        check_latents(rollout, prompts)
