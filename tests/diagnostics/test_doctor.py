"""Every fault is planted in an engine that really has it, and the doctor has to name that one and no other."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from flowcorr.diagnostics import DoctorReport, Finding, examine
from flowcorr.diagnostics.trials import MOVE, run_trials, velocity_gap
from flowcorr.errors import BackendError, BatchError
from flowcorr.models import Schedule
from flowcorr.rollout import InProcessEngine

SMALL = {"n": 2}
SHORT = {"num_inference_steps": 3, "sde_window_range": (0, 2)}
GUIDED = {"guidance_scale": 4.0}
FULL = {"path": "tiny_ocr", "max_sequence_length": 8}


def separate(run):
    """An engine with weights and a pipeline of its own, on which a fault can be planted."""
    family = copy.copy(run.family)
    family.pipeline = copy.copy(run.family.pipeline)
    own = run.family.transformer
    base = type(own).from_config(own.config).eval().requires_grad_(False)
    engine = InProcessEngine(
        family, run.config.rollout, run.config.sampling, seed=run.config.trainer.seed,
        merge=run.actor.merged_weights, base=base,
    )  # fmt: skip
    if engine._copy is None:
        engine._copy = base
    return engine


def check(run, engine):
    """The report on `engine`, which has the weights that the actor has now."""
    engine.sync(run.actor.snapshot())
    return examine(run.actor, engine, run.conditioning)


def statuses(report, status):
    return [finding.check for finding in report.findings if finding.status == status]


def finding_of(report, name):
    return next(finding for finding in report.findings if finding.check == name)


@pytest.fixture
def small_run(make_run):
    """A run of few and short trajectories whose adapter has already learned something."""

    def make(*, stirred=True, **sections):
        small = {"rollout": SMALL, "sampling": SHORT}
        merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {*small, *sections}}
        run = make_run(**merged)
        if stirred:
            run.stir()
        return run

    return make


@pytest.fixture
def full_run(small_run, make_config):
    """A run that trains all weights."""
    lora = replace(make_config().model.lora, rank=0)
    return small_run(stirred=False, model={**FULL, "lora": lora}, rollout={"emulate": "int8"})


# Healthy engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "sections"),
    [
        (True, {}),
        (True, {"sampling": GUIDED}),
        (True, {"actor": {"micro_batch_size": 3, "fold_steps": False}}),
        (False, {}),
        (False, {"sampling": {**GUIDED, "sde_type": "cps"}}),
        (False, {"sampling": {"sde_type": "dance_sde", "window_per": "sample", "sde_window_size": 1}}),
        (False, {"rollout": {"staleness": 2, "batch_size": 3}}),
    ],
)
def test_healthy_float32_passes_everything(small_run, shared, sections):
    run = small_run(**sections)
    report = check(run, run.engine if shared else separate(run))
    assert set(statuses(report, "PASS")) == {finding.check for finding in report.findings}
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("rollout", "sampling"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16"}, GUIDED),
        ({"emulate": "fp8"}, {"num_inference_steps": 10, "sde_window_range": (0, 8)}),
        ({"emulate": "int8"}, GUIDED),
        ({"emulate": "int4"}, GUIDED),
    ],
)
def test_lost_precision_is_no_failure(small_run, rollout, sampling):
    run = small_run(rollout=rollout, sampling=sampling)
    report = check(run, run.engine)
    assert report.failed() == []
    assert 1e-6 < report.noise[0].exact_kl < 0.1


def test_full_fine_tuning(full_run):
    report = check(full_run, full_run.engine)
    assert report.failed() == []
    assert statuses(report, "SKIP") == ["lora"]
    assert "trained weights" in finding_of(report, "sync").message


# Faults: each changes an engine ----------------------------------------------------------------------------


def returning(**changes):
    """A fault in what is returned: fields of the `Rollout`, each computed from the true one."""

    def plant(engine):
        sample = engine.sample

        def altered(*args, **kwargs):
            rollout = sample(*args, **kwargs)
            return replace(rollout, **{name: change(rollout) for name, change in changes.items()})

        engine.sample = altered

    return plant


def another_schedule(make):
    """A fault in the schedule, made from the engine's own."""

    def plant(engine):
        engine.schedule = make(engine)

    return plant


def another_sampling(**changes):
    def plant(engine):
        engine.sampling = replace(engine.sampling, **changes)

    return plant


def another_guidance(**changes):
    def plant(engine):
        engine.guidance = replace(engine.guidance, **changes)

    return plant


def feeding(change):
    """A fault that the trajectory does not tell of: the model is fed other timesteps than are returned."""

    def plant(engine):
        velocity = engine.family.velocity
        engine.family.velocity = lambda transformer, latents, timesteps, *rest: velocity(
            transformer, latents, change(timesteps), *rest
        )

    return plant


def conditioned(change, *, told):
    """The engine samples with another conditioning, which it returns if `told`."""

    def plant(engine):
        sample = engine.sample

        def altered(conditioning, groups, **kwargs):
            rollout = sample(change(engine, conditioning), groups, **kwargs)
            members = rollout.num_samples // len(groups)
            true = {name: rows.repeat_interleave(members, 0) for name, rows in conditioning.items()}
            return rollout if told else replace(rollout, conditioning=true)

        engine.sample = altered

    return plant


def merging(change):
    """A fault in the weights: `change(tensors, merge)` gives the state that is loaded."""

    def plant(engine):
        merge = engine._merge
        engine._merge = lambda tensors: change(tensors, merge)

    return plant


def rounded(tensor):
    return tensor.to(torch.bfloat16).float()


def shifted(engine):
    scheduler = engine.family.pipeline.scheduler
    engine.family.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift=2.0)
    return engine.family.schedule(engine.sampling.num_inference_steps, engine.latent_shape)


def with_timesteps(change):
    return lambda engine: Schedule(
        sigmas=engine.schedule.sigmas,
        timesteps=tuple(change(torch.tensor(engine.schedule.timesteps)).tolist()),
    )


def scale_up(factor):
    """The adapter's effect times `factor`."""
    return lambda tensors, merge: merge(
        {name: factor * value if "lora_B" in name else value for name, value in tensors.items()}
    )


def without_layers(kept):
    return lambda tensors, merge: merge(
        {
            name: value if "lora_B" not in name or kept(name) else torch.zeros_like(value)
            for name, value in tensors.items()
        }
    )


def another_checkpoint(tensors, merge):
    """Every matrix moved by half of its size, as a longer training would."""
    draw = torch.Generator().manual_seed(5)
    return {
        name: value + 0.5 * value.std() * torch.randn(value.shape, generator=draw)
        if value.dim() == 2
        else value
        for name, value in merge(tensors).items()
    }


def one_block_missing(tensors, merge):
    state = merge(tensors)
    return {
        name: torch.zeros_like(value) if "blocks.2.ff" in name else value for name, value in state.items()
    }


def one_sync_behind(engine):
    sync, waiting = engine.sync, []

    def late(weights):
        waiting.append(weights)
        sync(waiting[-2] if len(waiting) > 1 else weights)

    engine.sync = late


def deaf_after_the_first_sync(engine):
    sync, heard = engine.sync, []

    def once(weights):
        if not heard:
            heard.append(weights)
            sync(weights)

    engine.sync = once


def forgets_the_seed(engine):
    sample = engine.sample

    def elsewhere(*args, **kwargs):
        engine.seed += 1
        return sample(*args, **kwargs)

    engine.sample = elsewhere


def seeds_by_place(engine):
    sample = engine.sample
    engine.sample = lambda conditioning, groups, **kwargs: sample(conditioning, range(len(groups)), **kwargs)


def another_vae(engine):
    vae = copy.deepcopy(engine.family.pipeline.vae)
    draw = torch.Generator().manual_seed(5)
    for parameter in vae.decoder.parameters():
        parameter.data += 0.5 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=draw)
    engine.family.pipeline.vae = vae


def no_vae_scaling(engine):
    engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
    engine.family.pipeline.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)


def rolled(engine, conditioning):
    return {name: rows.roll(1, 0) for name, rows in conditioning.items()}


def other_words(engine, conditioning):
    encoded = engine.family.encode(["pear", "lime"], engine.guidance)
    return {name: encoded[name][-len(rows) :] for name, rows in conditioning.items()}


def shorter(engine, conditioning):
    return {name: rows[:, :-1] if name == "prompt_embeds" else rows for name, rows in conditioning.items()}


def spoiled(rollout):
    latents = rollout.latents.clone()
    latents[0, 0, 0, 0, 0] = torch.nan
    return latents


def nudged(scale):
    """Next latents that moved after they were scored."""

    def change(rollout):
        latents = rollout.latents.clone()
        noise = torch.randn(latents[:, 1:].shape, generator=torch.Generator().manual_seed(3))
        latents[:, 1:] += scale * noise
        return latents

    return change


def rounded_after_scoring(rollout):
    return torch.cat([rollout.latents[:, :1], rounded(rollout.latents[:, 1:])], dim=1)


def without_normaliser(rollout):
    return rollout.log_probs + rollout.stds.log() + 0.918938533


def unscaled(rollout):
    return 2 * rollout.stds.square() * without_normaliser(rollout)


FAULTS = {
    "values that are not finite": ("finite", returning(latents=spoiled), {}),
    "another shift": ("schedule", another_schedule(shifted), {}),
    "one step fewer": (
        "schedule",
        another_schedule(lambda engine: engine.family.schedule(2, engine.latent_shape)),
        {},
    ),
    "sigmas rounded to bfloat16": (
        "schedule",
        another_schedule(
            lambda engine: replace(
                engine.schedule, sigmas=tuple(rounded(torch.tensor(engine.schedule.sigmas)).tolist())
            )
        ),
        {},
    ),
    "the window one step later": ("window", another_sampling(sde_window_range=(1, 3)), {}),
    "steps counted from one": (
        "window",
        returning(step_indices=lambda rollout: rollout.step_indices + 1),
        {},
    ),
    "a window for each image": (
        "window",
        another_sampling(window_per="sample"),
        {"rollout": {"n": 6}, "sampling": {"sde_window_size": 1}},
    ),
    "latents rounded to bfloat16": (
        "latent_dtype",
        returning(latents=lambda rollout: rounded(rollout.latents)),
        {},
    ),
    "next latents rounded after they were scored": (
        "latent_dtype",
        returning(latents=rounded_after_scoring),
        {},
    ),
    "another noise level": ("transition", another_sampling(noise_level=0.8), {}),
    "another sde type": ("transition", another_sampling(sde_type="dance_sde"), {}),
    "summed log-probs": ("log_probs", returning(log_probs=lambda rollout: 512 * rollout.log_probs), {}),
    "log-probs without normaliser": ("log_probs", returning(log_probs=without_normaliser), {}),
    "log-probs without scale": ("log_probs", returning(log_probs=unscaled), {}),
    "log-probs rounded to bfloat16": (
        "log_probs",
        returning(log_probs=lambda rollout: rounded(rollout.log_probs)),
        {},
    ),
    "step means of another step": (
        "bookkeeping",
        returning(means=lambda rollout: rollout.means.roll(1, 1)),
        {},
    ),
    "latents that moved after they were scored": ("bookkeeping", returning(latents=nudged(1e-3)), {}),
    "noise without a seed": ("determinism", forgets_the_seed, {}),
    "noise by place in the batch": ("batch_shape", seeds_by_place, {}),
    "timesteps divided by 1000": (
        "timesteps",
        another_schedule(with_timesteps(lambda timesteps: timesteps / 1000)),
        {},
    ),
    "timesteps divided by 1000 unnoticed": ("timesteps", feeding(lambda timesteps: timesteps / 1000), {}),
    "timesteps rounded unnoticed": ("timesteps", feeding(rounded), {}),
    "other prompts": ("embeddings", conditioned(other_words, told=True), {}),
    "another sequence length": ("embeddings", conditioned(shorter, told=True), {}),
    "prompts mixed up unnoticed": ("embeddings", conditioned(rolled, told=False), {}),
    "no guidance": ("guidance", another_guidance(guidance_scale=1.0), {"sampling": GUIDED}),
    "another guidance scale": ("guidance", another_guidance(guidance_scale=5.0), {"sampling": GUIDED}),
    "no guidance, fp8": (
        "guidance",
        another_guidance(guidance_scale=1.0),
        {"sampling": GUIDED, "rollout": {"emulate": "fp8"}},
    ),
    "one sync behind": ("sync", one_sync_behind, {}),
    "deaf after the first sync": ("sync", deaf_after_the_first_sync, {}),
    "another checkpoint": ("weights", merging(another_checkpoint), {}),
    "a block's feed-forward lost": ("weights", merging(one_block_missing), {}),
    "a checkpoint quantised unasked": (
        "weights",
        lambda engine: setattr(engine, "config", replace(engine.config, emulate="int4")),
        {},
    ),
    "an adapter on misnamed layers": ("lora", merging(without_layers(lambda name: False)), {}),
    "an adapter on half of the layers": (
        "lora",
        merging(without_layers(lambda name: "blocks.0" in name or "blocks.1" in name)),
        {},
    ),
    "an adapter without alpha over rank": ("lora", merging(scale_up(0.5)), {}),
    "an adapter applied twice": ("lora", merging(scale_up(2.0)), {}),
    "half an adapter, int4": (
        "lora",
        merging(without_layers(lambda name: "blocks.0" in name or "blocks.1" in name)),
        {"rollout": {"emulate": "int4"}},
    ),
    "another VAE": ("images", another_vae, {}),
    "latents decoded without scaling": ("images", no_vae_scaling, {}),
}


MESSAGES = {
    "sigmas rounded to bfloat16": "rounded to bfloat16",
    "steps counted from one": "is called 1, but its sigma is that of step 0",
    "summed log-probs": "summed over the elements",
    "log-probs without scale": "squared distances",
    "timesteps rounded unnoticed": "rounded to bfloat16",
    "timesteps divided by 1000 unnoticed": "divided by 1000",
    "another sequence length": "prompt_embeds is [4, 15, 64] in the engine",
    "prompts mixed up unnoticed": "other prompts of the batch",
    "no guidance": "guidance_scale=1 instead of 4",
    "another guidance scale": "guidance_scale=5 instead of 4",
    "one sync behind": "of one sync ago",
    "deaf after the first sync": "from before several syncs",
    "an adapter on misnamed layers": "binds to no layer",
    "an adapter on half of the layers": "layers are left out",
    "an adapter without alpha over rank": "its scale differs",
    "an adapter applied twice": "its scale differs",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_no_other(small_run, fault):
    name, plant, sections = FAULTS[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    report = check(run, engine)
    assert report.failed() == [name]
    assert report.exit_code == 2
    assert MESSAGES.get(fault, "") in finding_of(report, name).message
    assert finding_of(report, name).remedy


def test_a_fresh_adapter_that_never_arrives(small_run):
    run = small_run(stirred=False)
    engine = separate(run)
    deaf_after_the_first_sync(engine)
    report = check(run, engine)
    assert report.failed() == ["lora"]
    assert "never arrives" in finding_of(report, "lora").message


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (one_sync_behind, "of one sync ago"),
        (deaf_after_the_first_sync, "from before several syncs"),
    ],
)
def test_full_weights_from_before(full_run, plant, message):
    engine = separate(full_run)
    plant(engine)
    report = check(full_run, engine)
    assert report.failed() == ["sync"]
    assert message in finding_of(report, "sync").message


def test_full_weights_of_which_half_arrive(full_run):
    engine, first = separate(full_run), full_run.actor.snapshot().tensors

    def half(tensors, merge):
        return merge({name: first[name] if "blocks.1" in name else value for name, value in tensors.items()})

    merging(half)(engine)
    report = check(full_run, engine)
    assert report.failed() == ["sync"]
    assert "layers are left out" in finding_of(report, "sync").message


@pytest.mark.parametrize("rollout", [{}, {"dtype": "bfloat16"}, {"emulate": "fp8"}])
def test_another_family(tmp_path, make_config, rollout):
    import tiny_pipelines

    height, width = tiny_pipelines.QWEN_SIZE
    config = make_config(
        model={"path": str(tiny_pipelines.build_tiny_qwen_image(tmp_path)), "max_sequence_length": 16},
        sampling={**SHORT, "height": height, "width": width, "true_cfg_scale": 4.0},
        rollout={**SMALL, **rollout},
    )
    _, actor, engine, conditioning = tiny_pipelines.connect(config, ["cat", "dog"])
    tiny_pipelines.stir(actor)
    engine.sync(actor.snapshot())
    assert examine(actor, engine, conditioning).failed() == []
    another_guidance(true_cfg_scale=1.0)(engine)
    assert examine(actor, engine, conditioning).failed() == ["guidance"]


@pytest.mark.parametrize("rollout", [{}, {"dtype": "bfloat16"}, {"emulate": "fp8"}])
def test_distilled_guidance(tmp_path, make_config, rollout):
    import tiny_pipelines

    height, width = tiny_pipelines.FLUX_SIZE
    config = make_config(
        model={"path": str(tiny_pipelines.build_tiny_flux(tmp_path)), "max_sequence_length": 16},
        sampling={**SHORT, "height": height, "width": width, "guidance_scale": 3.5},
        rollout={**SMALL, **rollout},
    )
    _, actor, engine, conditioning = tiny_pipelines.connect(config, ["cat", "dog"])
    tiny_pipelines.stir(actor)
    engine.sync(actor.snapshot())
    assert examine(actor, engine, conditioning).failed() == []
    another_guidance(guidance_scale=1.0)(engine)
    report = examine(actor, engine, conditioning)
    assert report.failed() == ["guidance"]
    assert "guidance_scale=1 instead of 3.5" in finding_of(report, "guidance").message


# What only warns -----------------------------------------------------------------------------------------


def jitter(scale):
    """An engine whose kernels do not add up in a fixed order."""

    def plant(engine):
        velocity, draw = engine.family.velocity, torch.Generator().manual_seed(0)

        def shaken(*args):
            exact = velocity(*args)
            return exact * (1 + scale * torch.randn(exact.shape, generator=draw))

        engine.family.velocity = shaken

    return plant


def rounded_by_the_model(engine):
    """Nothing but the timesteps is rounded, so that the small model shows it."""
    feeding(rounded)(engine)
    engine.dtype, engine._copy = torch.float32, engine._copy.float()


@pytest.mark.parametrize(
    ("plant", "sections", "warned"),
    [
        (another_schedule(with_timesteps(rounded)), {}, "timesteps"),
        (rounded_by_the_model, {"rollout": {"dtype": "bfloat16"}}, "timesteps"),
        (jitter(1e-4), {}, "determinism"),
        (
            lambda engine: setattr(engine, "config", replace(engine.config, emulate="int8")),
            {},
            "weights",
        ),
    ],
)
def test_what_only_costs_precision_warns(small_run, plant, sections, warned):
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    report = check(run, engine)
    assert report.failed() == []
    assert statuses(report, "WARN") == [warned]
    assert report.exit_code == 1


def test_a_gap_above_the_clip_warns_in_bypass(small_run):
    from flowcorr.correction import RolloutCorrectionConfig

    bypass = {"rollout_correction": RolloutCorrectionConfig.preset("bypass_ppo_clip")}
    run = small_run(rollout={"emulate": "fp8"}, algorithm=bypass, actor={"clip_ratio": 1e-5})
    report = check(run, run.engine)
    assert statuses(report, "WARN") == ["clip"]
    assert finding_of(report, "clip").value > 0.9
    wide = small_run(rollout={"emulate": "fp8"}, algorithm=bypass, actor={"clip_ratio": 0.2})
    assert check(wide, wide.engine).exit_code == 0


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "importance_cap", "flow_dppo"])
def test_the_clip_is_judged_on_the_ratio_that_the_loss_uses(small_run, loss_mode):
    """grpo_guard takes the mean of the drift off, and multiplies by s."""
    from flowcorr.correction import RolloutCorrectionConfig

    bypass = {"rollout_correction": RolloutCorrectionConfig.preset("bypass_ppo_clip")}
    limit = 0.01
    actor = {"clip_ratio": limit, "importance_cap": 1 + limit, "loss_mode": loss_mode}
    run = small_run(rollout={"emulate": "int4"}, algorithm=bypass, actor=actor)
    found = finding_of(check(run, run.engine), "clip")
    if loss_mode == "flow_dppo":
        assert found.message == "the loss does not clip"
        return
    rollout = run.engine.sample(run.conditioning, range(2), training_step=0, with_means=True)
    scores = run.actor.log_probs(rollout, with_means=True)
    log_ratio = (scores.log_probs - rollout.log_probs).double()
    if loss_mode == "grpo_guard":
        r_squared = (scores.means - rollout.means).square().flatten(2).mean(-1) / rollout.stds.square()
        log_ratio = (log_ratio + r_squared / 2) * rollout.stds
    expected = (log_ratio.expm1().abs() > limit).double().mean().item()
    assert 0 < expected < 1
    assert found.value == pytest.approx(expected)
    key = f"importance_cap={1 + limit}" if loss_mode == "importance_cap" else f"clip_ratio={limit}"
    assert f"outside actor.{key} before" in found.message


def test_squared_distances_are_judged_in_their_own_unit(small_run):
    """Else a gap between means alone would look as if other latents had been scored."""
    found = {}
    for unscaled in (False, True):
        sampling = {"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": unscaled}
        run = small_run(rollout={"emulate": "int4"}, sampling=sampling)
        found[unscaled] = finding_of(check(run, run.engine), "bookkeeping")
    assert found[True].status == found[False].status == "PASS"
    # Not quite equal, as less is put down to the rounding of log-probs in the one case.
    assert found[True].value == pytest.approx(found[False].value, rel=0.25)


def test_an_engine_may_describe_itself(small_run):
    class Described(InProcessEngine):
        def describe(self):
            return {"attention": "FLASH_ATTN", "dtype": "float32"}

    run = small_run()
    engine = separate(run)
    engine.__class__ = Described
    found = finding_of(check(run, engine), "attention")
    assert found.status == "PASS"
    assert "attention FLASH_ATTN" in found.message
    assert "JointAttnProcessor2_0" in found.message
    engine.config = replace(engine.config, emulate="int8")
    assert statuses(check(run, engine), "WARN") == ["weights", "attention"]


# The exam itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout", [{}, {"emulate": "int8"}, {"staleness": 2}])
def test_everything_is_as_before(small_run, rollout):
    run = small_run(rollout=rollout)
    for seed in range(3):
        run.stir(seed=seed)
    before, history, expected = run.actor.snapshot(), run.engine.history, run.sample()
    random, guidance = torch.get_rng_state(), run.actor.guidance
    examine(run.actor, run.engine, run.conditioning)
    after = run.actor.snapshot()
    assert all(torch.equal(after.tensors[name], value) for name, value in before.tensors.items())
    assert after.version == before.version
    assert run.actor.guidance is guidance
    assert all(parameter.grad is None for parameter in run.actor.parameters.values())
    assert [weights.version for weights in run.engine.history] == [weights.version for weights in history]
    assert torch.equal(run.sample().log_probs, expected.log_probs)
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_come_back_where_the_engine_fails(small_run):
    run = small_run()
    before = run.actor.snapshot()
    sample, calls = run.engine.sample, []

    def dies_at_last(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise BackendError("the engine died")
        return sample(*args, **kwargs)

    run.engine.sample = dies_at_last
    with pytest.raises(BackendError, match="the engine died"):
        examine(run.actor, run.engine, run.conditioning)
    assert all(torch.equal(run.actor.parameters[name], value) for name, value in before.tensors.items())
    assert run.engine.history[-1].version == before.version


def test_weights_move_by_the_size_that_is_wanted(small_run):
    run = small_run()
    trials = run_trials(run.actor, run.engine, run.conditioning)
    moved = trials.moved
    change = velocity_gap(moved.means, trials.moved_under["current"], moved.still)
    assert change == pytest.approx(MOVE, rel=0.2)
    assert moved.rollout.policy_versions.unique().tolist() == [run.actor.version + 2]


def test_velocity_gap_is_that_of_the_velocities(small_run):
    run = small_run(sampling={"sde_type": "cps"})
    rollout = run.sample()
    trials = run_trials(run.actor, run.engine, run.conditioning)
    trial = trials.base
    scaled = trial.still + 1.25 * (trial.means - trial.still)
    assert velocity_gap(scaled, trial.means, trial.still) == pytest.approx(0.25, rel=1e-5)
    assert rollout.num_steps == trial.means.shape[1]


@pytest.mark.parametrize(("clip", "center"), [(1e-4, "none"), ((1e-4, 5e-4), "drift")])
def test_noise_floor_by_hand(small_run, clip, center):
    run = small_run(rollout={"emulate": "int8"}, actor={"clip_ratio": clip, "clip_center": center})
    report = check(run, run.engine)
    rollout = run.engine.sample(run.conditioning, range(2), training_step=0, with_means=True)
    scores = run.actor.log_probs(rollout, with_means=True)
    signed = (scores.log_probs - rollout.log_probs).double()
    delta, off = signed.abs(), (signed - (signed.mean(0) if center == "drift" else 0.0)).expm1().abs()
    r_squared = (scores.means - rollout.means).square().flatten(2).mean(-1) / rollout.stds.square()
    assert [step.step_index for step in report.noise] == [0, 1]
    for place, step in enumerate(report.noise):
        assert step.sigma == pytest.approx(rollout.sigmas[0, place].item())
        assert step.abs_delta[0] == pytest.approx(delta[:, place].quantile(0.5).item())
        assert step.abs_delta[0] <= step.abs_delta[1] <= step.abs_delta[2]
        assert step.exact_kl == pytest.approx(r_squared[:, place].mean().item() / 2)
        limit = clip[place] if isinstance(clip, tuple) else clip
        assert step.outside_clip == pytest.approx((off[:, place] > limit).double().mean().item())
    assert report.num_elements == 4 * 8 * 16


def test_one_prompt_is_too_few(small_run):
    run = small_run(stirred=False)
    one = {name: rows[:1] for name, rows in run.conditioning.items()}
    with pytest.raises(BatchError, match="examine at least 2"):
        examine(run.actor, run.engine, one)


def test_an_engine_without_step_means_cannot_be_examined(small_run):
    run = small_run(stirred=False)
    returning(means=lambda rollout: None)(run.engine)
    with pytest.raises(BackendError, match="no step means"):
        examine(run.actor, run.engine, run.conditioning)


def test_the_report_is_plain_json():
    findings = [
        Finding(check="a", status="PASS", message="m"),
        Finding(check="b", status="WARN", message="m", value=float("nan")),
    ]
    report = DoctorReport(findings=findings, noise=[], num_elements=4, clip_ratio=0.1)
    plain = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert plain["exit_code"] == 1
    assert plain["findings"][1]["value"] is None
