"""What is quick to fail comes before a model is loaded, and what only a loaded model tells is told then."""

import gc
import json
import sys
import weakref

import pytest
import torch
from PIL import Image

from flowcorr import config
from flowcorr.actor import weights
from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.models.quantized import whole_copy
from flowcorr.rewards import ThreadReward, WeightedSum
from flowcorr.trainer import setup
from flowcorr.trainer.setup import build_run
from tests.trainer.runs import small_config


def test_what_is_not_installed_is_said_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(setup, "load_family", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(MissingExtraError, match=r"rollout\.placement=ray .*flowcorr\[ray\]"):
        build_run(config.load("tiny_jpeg_lora", ["rollout.placement=ray"]))


class Loading(Exception):
    """Ends a test where a model, or what it needs, would be loaded."""


def stop(*_, **__):
    raise Loading


@pytest.fixture
def with_gpus(monkeypatch):
    """A machine with GPUs, on which nothing is loaded."""

    monkeypatch.setattr(setup, "check_installed", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(setup, "load_prompts", stop)


@pytest.mark.parametrize(("options", "gpus"), [([], 1), (["rollout.engine.tensor_parallel_size=2"], 2)])
def test_workers_of_vllm_omni_without_a_gpu_are_refused_at_once(with_gpus, options, gpus):
    overrides = ["rollout.name=vllm_omni", "rollout.placement=ray", *options]
    with pytest.raises(ConfigError, match=rf"no GPU; set rollout\.worker_resources={{num_gpus: {gpus}}}"):
        build_run(config.load("tiny_jpeg_lora", overrides))
    with pytest.raises(Loading):
        build_run(config.load("tiny_jpeg_lora", [*overrides, "rollout.worker_resources={num_gpus: 1}"]))


def test_rewards_are_built_where_the_trainer_computes(monkeypatch):
    """One GPU that `trainer.device` names is the current one before the rewards, whose device is `auto`, are built."""
    chosen = []
    monkeypatch.setattr(setup.distributed, "local_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(setup, "_build_reward", stop)
    for device in ("cuda:7", "cuda", "cpu"):
        with pytest.raises(Loading):
            setup.build_run(small_config(f"trainer.device={device}"))
    assert chosen == [torch.device("cuda:7")]


def test_a_reward_model_that_would_run_on_a_cpu_warns(with_gpus):
    overrides = ["reward.placement=ray", "reward.terms=[{name: pickscore}]"]
    with (
        pytest.warns(UserWarning, match=r" pickscore .*reward\.worker_resources={num_gpus: 0\.25}"),
        pytest.raises(Loading),
    ):
        build_run(config.load("tiny_jpeg_lora", overrides))
    with pytest.raises(Loading):
        build_run(config.load("tiny_jpeg_lora", [*overrides, "reward.worker_resources={num_gpus: 1}"]))


def test_images_for_a_model_that_takes_none_are_refused(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    lines = [{"prompt": text, "image": "a.png"} for text in "abcdefgh"]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, lines)))
    overrides = [f"data.path={tmp_path}/edits.jsonl", "data.heldout_fraction=0.5"]
    with pytest.raises(ConfigError, match=r"edits\.jsonl:\d has 1 .* sd3 takes 0;"):
        build_run(config.load("tiny_jpeg_lora", overrides))


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        ((), "eval/reward, eval/reward_std"),
        (
            ("trainer.eval_on=both", "model.quantization=int8"),
            "eval/reward, eval/reward_std, eval/served/reward, eval/served/reward_std",
        ),
    ],
)
def test_a_best_metric_that_no_evaluation_yields_is_refused_at_once(monkeypatch, overrides, choices):
    monkeypatch.setattr(setup, "load_family", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=rf"trainer\.best_metric='eval/exact_match' .*from {choices}$"):
        build_run(config.load("tiny_jpeg_lora", [*overrides, "trainer.best_metric=eval/exact_match"]))


def test_a_best_metric_that_an_own_reward_lacks_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "load_family", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scores_of_mine.py").write_text(
        "def shade(images, prompts):\n    return images.mean((1, 2, 3))\n"
    )
    with pytest.raises(ConfigError) as refused:
        build_run(config.load("tiny_ocr_lora", ["reward.terms=[{name: scores_of_mine:shade}]"]))
    key, choices, fix = str(refused.value).split(";")
    assert key.startswith("trainer.best_metric='eval/exact_match'")
    assert choices.endswith("eval/reward, eval/reward_std")
    assert "shade.extras = (NAME,)" in fix


@pytest.mark.parametrize(
    ("train", "heldout", "reward", "place"),
    [
        ("cat", '"dog"', "terms", "train.txt:3"),
        ('"cat"', "dog", "terms", "heldout.txt:1"),
        ("cat", '"dog"', "gold", "train.txt:3"),
        ("cat", "dog", "gold reward.gold_every=evaluation", "heldout.txt:1"),
        ("cat", '"dog"', "gold reward.gold_every=evaluation", None),
    ],
)
def test_a_missing_target_is_found_before_a_model_is_loaded(
    monkeypatch, tmp_path, train, heldout, reward, place
):
    monkeypatch.setattr(setup, "load_family", stop)
    (tmp_path / "train.txt").write_text(f'a "sign"\n\n{train}\n')
    (tmp_path / "heldout.txt").write_text(f"{heldout}\n")
    key, *rest = reward.split()
    overrides = [
        f"data.path={tmp_path / 'train.txt'}",
        f"data.heldout_path={tmp_path / 'heldout.txt'}",
        *rest,
    ]
    settings = config.load("tiny_jpeg_lora", [f"reward.{key}=[{{name: ocr}}]", *overrides])
    error, named = (ConfigError, f"/{place}: .* reward ocr ") if place else (Loading, None)
    with pytest.raises(error, match=named):
        build_run(settings)


def test_the_text_encoders_are_gone_before_an_engine_starts(monkeypatch):
    started = []

    def start(_, family, *, probe, **__):
        started.append((family.pipeline.text_encoder, family.pipeline.text_encoder_3))
        assert probe.start.isfinite().all()

    monkeypatch.setattr(setup, "check_installed", lambda _: None)
    monkeypatch.setattr(setup, "build_backend", start)
    build_run(small_config("rollout.name=vllm_omni"))
    assert started == [(None, None)]


@pytest.mark.parametrize(
    ("name", "phase"), [("load_family", "loading the model"), ("PromptCache", "encoding prompts")]
)
def test_text_encoders_that_do_not_fit_are_an_error_that_names_their_key(monkeypatch, name, phase):
    def fill(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(setup, name, fill)
    with pytest.raises(BackendError, match=rf"{phase} .*: set model\.offload_text_encoders=true;"):
        build_run(config.load("tiny_jpeg_lora"))


def test_the_transformer_before_training_is_gone_once_the_engine_has_copied_it(monkeypatch):
    """It would fill the host's memory during the whole run."""
    copies = []

    def noted(*arguments):
        copied = whole_copy(*arguments)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(weights, "whole_copy", noted)
    run, _ = build_run(small_config("rollout.emulate=int8"))
    gc.collect()
    assert [copied() for copied in copies] == [None]
    run.close()


def test_guidance_that_the_loaded_model_does_not_read_warns():
    """The family is not known before."""
    settings = small_config("sampling.true_cfg_scale=4.5")
    message = (
        "sampling.true_cfg_scale=4.5 has no effect: a model of the family sd3 reads sampling.guidance_scale"
    )
    with pytest.warns(UserWarning, match=message):
        run, _ = build_run(settings)
    run.close()


@pytest.mark.parametrize(
    ("placement", "name", "kind"),
    [
        ("auto", "jpeg_compressibility", ThreadReward),
        ("local", "jpeg_compressibility", WeightedSum),
        ("auto", "plain_reward:brightness", WeightedSum),
        ("thread", "plain_reward:brightness", ThreadReward),
    ],
)
def test_a_reward_has_a_thread_where_it_says_that_it_may_or_the_recipe_does(
    placement, name, kind, tmp_path, monkeypatch
):
    (tmp_path / "plain_reward.py").write_text(
        "def brightness(images, prompts):\n    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run, _ = build_run(small_config(f"reward.placement={placement}", f"reward.terms=[{{name: '{name}'}}]"))
    run.close()
    assert isinstance(run.reward, kind)
