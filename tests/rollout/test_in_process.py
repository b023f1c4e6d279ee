import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pipelines import PIPELINES, connect

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import Guidance, load_family
from flowcorr.rollout import InProcessEngine, decode, in_process
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, LOG_PROBS

EMULATED = ["int8", "fp8", "int4"]
SAME = LOG_PROBS["atol"]


def mismatch(run):
    """Mean |log-prob of the actor - log-prob of the engine|, nats per latent element."""
    rollout = run.sample()
    return (run.actor.log_probs(rollout).log_probs - rollout.log_probs).abs().mean().item()


def restarted(run):
    """A second engine of the same configuration."""
    return InProcessEngine(
        run.family, run.config.rollout, run.config.sampling, seed=run.config.trainer.seed,
        merge=run.actor.weights.merged, base=run.actor.weights.untrained,
    )  # fmt: skip


def test_shapes_and_owners(make_run):
    run = make_run()
    rollout = run.sample()
    assert (
        rollout.window.latents.shape
        == rollout.window.next_latents.shape
        == rollout.window.means.shape
        == (8, 2, 4, 4, 8)
    )
    assert rollout.images.shape == (8, 16, 32, 3)
    assert rollout.group_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rollout.policy_versions.tolist() == [0] * 8
    assert rollout.conditioning_rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    for name, rows in rollout.conditioning.items():
        assert torch.equal(rows, run.conditioning[name])
    assert run.sample(with_means=False).window.means is None


def test_images_are_those_of_the_final_latents(make_run):
    run = make_run(sampling={"num_inference_steps": 2, "sde_window_range": (0, 2)})
    rollout = run.sample()
    images, finite = decode(run.family, rollout.window.next_latents[:, -1])
    assert torch.equal(rollout.images, images)
    assert torch.equal(rollout.finite_images, finite)


@pytest.mark.parametrize(
    ("images", "threads", "batch_size", "sizes"),
    [
        (8, 1, None, [8]),
        (3, 1, None, [3, 3, 2]),
        (2, 2, None, [4, 4]),
        (0, 1, None, [1] * 8),
        (3, 1, 5, [5, 3]),
    ],
)
def test_on_a_cpu_a_forward_pass_has_a_limit_of_tokens(
    make_run, monkeypatch, images, threads, batch_size, sizes
):
    """The passes of 8 images, where the limit allows for `images` a thread."""
    run, seen, decode = make_run(rollout={"batch_size": batch_size}), [], in_process.decode
    text = run.conditioning["prompt_embeds"].shape[1]
    monkeypatch.setattr(in_process, "CPU_TOKENS", images * (4 * 8 // 4 + text))
    monkeypatch.setattr(
        in_process,
        "decode",
        lambda family, latents, *rest: seen.append(len(latents)) or decode(family, latents, *rest),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run.sample()
    finally:
        torch.set_num_threads(before)
    assert seen == sizes


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_both_sides_of_guidance_read_the_reference_images(make_run, monkeypatch, guidance_scale):
    run, seen, decode = make_run(sampling={"guidance_scale": guidance_scale}), [], in_process.decode
    sides, text = 1 + (guidance_scale > 1), run.conditioning["prompt_embeds"].shape[1]
    prompts = run.conditioning | {"references": torch.zeros(2, 3, 4, 8, 16)}
    tokens = 4 * 8 // 4 + text + 3 * 4 * 8
    limit = math.ceil(2 * sides * tokens / torch.get_num_threads())
    monkeypatch.setattr(in_process, "CPU_TOKENS", limit)
    monkeypatch.setattr(
        in_process,
        "decode",
        lambda family, latents, *rest: seen.append(len(latents)) or decode(family, latents, *rest),
    )
    run.engine.sample(prompts, range(2), training_step=1, with_means=False)
    assert seen == [2, 2, 2, 2]


def test_windows_a_group_and_a_sample(make_run):
    wide = {"num_inference_steps": 6, "sde_window_range": (0, 6)}
    starts = make_run(sampling=wide, rollout={"n": 8}).sample().window.step_indices[:, 0].unflatten(0, (2, 8))
    assert (starts == starts[:, :1]).all()
    wide["window_per"] = "sample"
    rollout = make_run(sampling=wide, rollout={"n": 8}).sample()
    starts = rollout.window.step_indices[:, 0].unflatten(0, (2, 8))
    assert (starts != starts[:, :1]).any(1).all()
    assert (rollout.window.step_indices[:, 1] == rollout.window.step_indices[:, 0] + 1).all()


@settings(max_examples=10)
@given(
    sampling=st.fixed_dictionaries(
        {
            "sde_type": st.sampled_from(["sde", "cps", "dance_sde"]),
            "sde_window_size": st.integers(1, 4),
            "sde_window_layout": st.sampled_from(["consecutive", "scattered"]),
            "sde_noise_range": st.sampled_from([None, (0, 5), (2, 4)]),
            "window_per": st.sampled_from(["group", "sample"]),
        }
    ),
    same=st.booleans(),
    fold=st.booleans(),
)
def test_the_actor_recomputes_the_log_probs_of_any_window(make_run, sampling, same, fold):
    run = make_run(
        sampling={"num_inference_steps": 6, "sde_window_range": (0, 5), **sampling},
        rollout={"n": 2, "same_initial_noise": same},
        actor={"fold_steps": fold},
    )
    run.stir()
    rollout = run.sample()
    scores = run.actor.log_probs(rollout, with_means=True)
    # A rounding error of the mean counts in units of the std, which is small near the end of a cps trajectory.
    gap = (scores.log_probs - rollout.log_probs).abs()
    assert (gap < LOG_PROBS["atol"] + 1e-7 / rollout.window.stds).all()
    torch.testing.assert_close(scores.means, rollout.window.means, **LATENTS)
    following = rollout.window.step_indices.diff(dim=1) == 1
    torch.testing.assert_close(
        rollout.window.next_latents[:, :-1][following],
        rollout.window.latents[:, 1:][following],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("same", [True, False])
def test_initial_noise_of_a_group(make_run, same):
    run = make_run(
        sampling={"sde_window_range": (0, 2)}, rollout={"same_initial_noise": same}, trainer={"seed": 5}
    )
    first = run.sample().window.latents[:, 0].unflatten(0, (2, 4))
    assert bool((first[:, 0] == first[:, 1]).all()) == same
    assert not (first[0] == first[1]).any()


def test_every_training_step_has_its_own_noise(make_run):
    run = make_run()
    assert torch.equal(run.sample(1).window.latents, run.sample(1).window.latents)
    assert not torch.equal(run.sample(1).window.latents, run.sample(2).window.latents)


def test_a_shared_engine_holds_no_copy_and_follows_the_actor(make_run):
    run = make_run()
    assert run.engine.shared
    before = run.sample().window.means
    run.stir()
    rollout = run.sample()
    assert (rollout.window.means - before).abs().max() > 1e-3
    assert rollout.policy_versions.tolist() == [1] * 8
    assert mismatch(run) < SAME


def test_a_copy_in_the_same_precision_agrees_with_the_actor(make_run):
    run = make_run(rollout={"staleness": 1})
    run.stir()
    run.engine.sync(run.actor.weights.snapshot())
    assert not run.engine.shared
    assert run.engine.version == run.actor.weights.version
    assert mismatch(run) < SAME


@pytest.mark.parametrize("name", PIPELINES)
def test_a_copy_has_the_precisions_of_a_loaded_model(name, make_config, tmp_path):
    """Wan's has tables and norms that stay in float32 in any precision."""
    tiny, path = PIPELINES[name], tmp_path / "model"
    tiny.build(path)
    height, width = tiny.size
    loaded = {
        dtype: load_family(ModelConfig(path=str(path), dtype=dtype)) for dtype in ("float32", "bfloat16")
    }
    config = make_config(rollout={"dtype": "bfloat16"}, sampling={"height": height, "width": width})
    engine = InProcessEngine(
        loaded["float32"], config.rollout, config.sampling, seed=0, merge=lambda weights: [],
        base=loaded["float32"].transformer,
    )  # fmt: skip
    for own, expected in (
        (engine.transformer.named_parameters(), loaded["bfloat16"].transformer.named_parameters()),
        (engine.transformer.named_buffers(), loaded["bfloat16"].transformer.named_buffers()),
    ):
        found, tensors = dict(own), dict(expected)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[key], tensor), key
            assert found[key].dtype == tensor.dtype, key


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sde_noise_range": (1, 4), "guidance_scale": 3.0},
        {"window_per": "sample", "sde_window_layout": "scattered"},
    ],
    ids=["twins", "noise and guidance", "scattered"],
)
def test_longer_steps_change_images_and_no_bit_of_the_window(make_run, keys):
    keys = {"num_inference_steps": 8, "sde_window_range": (0, 3), **keys}
    whole = make_run(sampling=keys).sample()
    assert_same_window(whole, make_run(sampling={**keys, "post_window_stride": 3}).sample())


@pytest.mark.parametrize("name", ["qwen_image", "flux", "wan"])
def test_no_bit_of_the_window_of_another_family_changes(name, make_config, tmp_path):
    tiny, rollouts = PIPELINES[name], []
    for stride in (1, 2):
        sampling = {
            "height": tiny.size[0],
            "width": tiny.size[1],
            "num_frames": tiny.frames,
            "num_inference_steps": 6,
            "post_window_stride": stride,
            **tiny.guidance,
        }
        path = str(tmp_path if stride > 1 else tiny.build(tmp_path))
        config = make_config(model={"path": path, "max_sequence_length": tiny.tokens}, sampling=sampling)
        _, _, engine, conditioning = connect(config, ["cat", "dog"])
        rollouts.append(engine.sample(conditioning, range(2), training_step=1, with_means=True))
    assert_same_window(*rollouts)


def assert_same_window(whole, shortened):
    for name, expected in whole.window.columns().items():
        assert torch.equal(shortened.window.columns()[name], expected), name
    assert torch.equal(shortened.log_probs, whole.log_probs)
    assert not torch.equal(shortened.final_latents, whole.final_latents)


def test_emulated_precisions_disagree_in_their_order(make_run):
    found = {}
    for emulate in EMULATED:
        run = make_run(rollout={"emulate": emulate})
        run.stir()
        found[emulate] = mismatch(run)
    assert 2 * SAME < found["int8"] < found["fp8"] < found["int4"] < 0.1


def test_a_bfloat16_engine_disagrees_with_a_float32_actor(make_run):
    run = make_run(rollout={"dtype": "bfloat16"})
    rollout = run.sample()
    assert rollout.window.latents.dtype == rollout.log_probs.dtype == torch.float32
    assert rollout.conditioning["prompt_embeds"].dtype == torch.float32
    assert 2 * SAME < mismatch(run) < 0.1


def test_emulation_leaves_the_actor_alone(make_run):
    run = make_run(rollout={"emulate": "int4"})
    exact = make_run()
    rollout = exact.sample()
    assert torch.equal(run.actor.log_probs(rollout).log_probs, exact.actor.log_probs(rollout).log_probs)


def test_a_stale_engine_samples_with_weights_of_k_syncs_ago(make_run):
    run, fresh = make_run(rollout={"staleness": 2}), make_run()
    expected = []
    for update in range(5):
        expected.append(fresh.sample().window.means)
        rollout, old = run.sample(), max(0, update - 2)
        assert rollout.policy_versions.unique().tolist() == [old]
        torch.testing.assert_close(rollout.window.means, expected[old], **LATENTS)
        if old != update:
            assert (rollout.window.means - expected[update]).abs().max() > 1e-3
        run.stir(seed=update)
        fresh.stir(seed=update)
    assert [weights.version for weights in run.engine.history] == [3, 4, 5]


def test_restore_continues_with_the_history(make_run):
    run = make_run(rollout={"staleness": 2})
    for update in range(3):
        run.stir(seed=update)
    other = restarted(run)
    other.restore(run.engine.history)
    again = other.sample(run.conditioning, range(2), training_step=1, with_means=True)
    assert torch.equal(again.window.means, run.sample().window.means)
    assert other.version == run.engine.version == 1
    run.stir(seed=9)
    other.sync(run.actor.weights.snapshot())
    assert other.version == run.engine.version == 2


def test_history_is_a_copy_of_the_weights(make_run):
    run = make_run(rollout={"staleness": 1})
    before = {name: value.clone() for name, value in run.engine.history[0].tensors.items()}
    run.stir()
    assert all(torch.equal(run.engine.history[0].tensors[name], value) for name, value in before.items())


def test_guidance_reaches_the_engine(make_run):
    guided = make_run(sampling={"guidance_scale": 3.0})
    assert "negative_prompt_embeds" in guided.conditioning
    assert not torch.allclose(
        guided.sample().window.latents[:, 1], make_run().sample().window.latents[:, 1], atol=1e-3
    )
    assert mismatch(guided) < SAME


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"height": 30}, r"sampling\.height=30"),
        ({"sde_type": "cps", "sde_window_range": (0, 4)}, r"ends at sigma=0"),
    ],
)
def test_what_cannot_be_sampled_is_an_error_at_once(make_run, sampling, message):
    with pytest.raises(ConfigError, match=message):
        make_run(sampling=sampling)


def test_close_releases_the_copy(make_run):
    run = make_run(rollout={"emulate": "int8"})
    run.engine.close()
    assert run.engine.transformer is run.family.transformer


def test_a_family_may_be_sampled_without_an_actor(make_config):
    config = make_config()
    family = load_family(config.model)
    engine = InProcessEngine(
        family, config.rollout, config.sampling, seed=0, merge=dict, base=family.transformer
    )
    rollout = engine.sample(
        family.encode(prompts_of(["cat"]), Guidance()), [7], training_step=1, with_means=False
    )
    assert rollout.group_ids.tolist() == [7] * 4
