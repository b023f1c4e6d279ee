"""Configurations of other trainers become recipes that load."""

import warnings

import pytest
import yaml

from flowcorr import config
from flowcorr.cli import main
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from flowcorr.translate.flow_grpo import TABLE as FLOW_GRPO
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI

OMNI = "actor_rollout_ref."
SCRIPT = """
MODEL=Qwen/Qwen-Image
python3 -m verl_omni.trainer.main_diffusion \\
    data.train_files=data/train.parquet data.train_batch_size=32 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.lora_rank=64 \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.algo.sde_window_size=2 actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \\
    actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py \\
    trainer.logger='["console", "wandb"]' trainer.total_training_steps=300 {} "$@"
"""
GRPO = """
import ml_collections

def get():
    gpu_number = 4
    config = ml_collections.ConfigDict()
    config.resolution = 512
    config.dataset = "dataset/ocr"
    config.reward_fn = {"pickscore": 1.0, "geneval": 0.5}
    config.pretrained = ml_collections.ConfigDict()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.sample = ml_collections.ConfigDict()
    config.sample.train_batch_size = 8
    config.sample.num_image_per_prompt = 16
    config.sample.num_batches_per_epoch = 8
    config.sample.num_steps = 10
    config.train = ml_collections.ConfigDict()
    config.train.beta = 0.04
    config.train.timestep_fraction = 0.99
    config.train.gradient_accumulation_steps = 4
    return config
"""


def loaded(tmp_path, text):
    """The configuration of a recipe's text; no key of it may be without effect."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config.load(path)


@pytest.fixture
def omni(tmp_path):
    """`omni(*overrides)` is the recipe of the script with more overrides, and its text."""

    def make(*overrides):
        script = tmp_path / "run.sh"
        script.write_text(SCRIPT.format(" ".join(overrides)), encoding="utf-8")
        text = translate(str(script))
        return loaded(tmp_path, text), text

    return make


@pytest.fixture
def grpo(tmp_path):
    path = tmp_path / "grpo.py"
    path.write_text(GRPO, encoding="utf-8")
    return path


def test_verl_omnis_values_and_defaults(omni):
    found, text = omni()
    assert (found.model.path, found.model.dtype, found.model.lora.rank) == ("Qwen/Qwen-Image", "bfloat16", 64)
    assert (found.sampling.height, found.sampling.window_per) == (512, "sample")
    assert found.sampling.sde_window_range == (0, 5)
    assert (found.rollout.dtype, found.rollout.same_initial_noise) == ("bfloat16", False)
    assert (found.rollout.prompts_per_step, found.actor.mini_batches) == (32, 2)
    assert (found.actor.betas, found.actor.weight_decay, found.actor.lr) == ((0.9, 0.999), 0.01, 1e-6)
    assert found.actor.gradient_checkpointing
    assert found.model.max_sequence_length == 512
    assert found.actor.kl_coef == 0
    assert found.rollout.engine["tensor_parallel_size"] == 2
    assert found.algorithm.advantage_std == "global"
    assert found.algorithm.rollout_correction is None
    assert not found.rollout.calculate_log_probs
    assert [term.name for term in found.reward.terms] == ["ocr"]
    assert (found.data.path, found.trainer.trackers) == ("data/train.txt", ("wandb",))
    assert f"  path: Qwen/Qwen-Image  # {OMNI}model.path\n" in text
    assert f"height: 512  # verl-omni's default of {OMNI}rollout.pipeline.height; here: null" in text
    assert f"#   {OMNI}actor.fsdp_config.param_offload=True" in text
    assert "asymmetric k1 band" in text
    assert "not known to flowcorr translate" not in text


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ((f"{OMNI}actor.kl_loss_coef=0.04",), "actor.kl_coef", 0.0),
        ((f"{OMNI}actor.kl_loss_coef=0.04", f"{OMNI}actor.use_kl_loss=True"), "actor.kl_coef", 0.04),
        ((f"{OMNI}model.algorithm=grpo_guard",), "actor.loss_mode", "grpo_guard"),
        ((f"{OMNI}model.algorithm=flow_dppo",), "actor.kl_threshold", 1e-5),
        ((f"{OMNI}model.algorithm=mix_grpo",), "sampling.window_per", "group"),
        ((f"{OMNI}model.algorithm=dance_grpo",), "actor.loss_mode", "flow_grpo"),
        (
            (f"{OMNI}rollout.algo.sde_type=cps", f"{OMNI}rollout.algo.noise_level=0.8"),
            "sampling.cps_unscaled",
            True,
        ),
        ((f"{OMNI}rollout.algo.sde_window_size=null",), "sampling.sde_window_size", 9),
        (("algorithm.norm_adv_by_std_in_grpo=False",), "algorithm.advantage_std", "none"),
        (("algorithm.global_std=False",), "algorithm.advantage_std", "group"),
        (("data.val_files=data/test.parquet",), "data.heldout_path", "data/test.txt"),
        ((f"{OMNI}model.lora_rank=0", f"{OMNI}actor.fsdp_config.model_dtype=fp32"), "model.lora.rank", 0),
        ((f"{OMNI}actor.fsdp_config.model_dtype=fp32",), "actor.autocast", True),
        ((f"{OMNI}model.target_modules=\"['to_q','to_k']\"",), "model.lora.targets", ("to_q", "to_k")),
        ((f"{OMNI}actor.optim.lr_warmup_steps_ratio=0.1",), "actor.warmup_steps", 30),
        (
            (f"{OMNI}actor.optim.lr_scheduler_type=cosine", f"{OMNI}actor.optim.min_lr_ratio=0.1"),
            "actor.lr_min_ratio",
            0.1,
        ),
        ((f"{OMNI}rollout.val_kwargs.pipeline.height=1024",), "trainer.eval_height", 1024),
        (("trainer.test_freq=-1", "trainer.save_freq=20"), "trainer.save_every", 20),
    ],
)
def test_keys_that_depend_on_others(omni, overrides, key, value):
    found, _ = omni(*overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_correction_of_verl_omni(omni):
    correction = "algorithm.rollout_correction"
    bypass = (f"{correction}.bypass_mode=True", f"{correction}.rollout_is=sequence")
    found, _ = omni(
        *bypass, f"{correction}.rollout_rs=seq_mean_k1", f"{correction}.rollout_rs_threshold=0.5_2.0"
    )
    ours = found.algorithm.rollout_correction
    assert (ours.bypass_mode, ours.rollout_is, ours.rollout_rs) == (True, "sequence", "seq_mean_k1")
    assert ours.rollout_rs_threshold == (0.5, 2.0)
    assert ours.rollout_rs_denominator == "all"
    measured, _ = omni(f"{OMNI}rollout.calculate_log_probs=True")
    assert measured.algorithm.rollout_correction.mode == "decoupled"


def test_rewards_by_name(omni):
    found, text = omni(
        "+reward.reward_functions.a.path=score/jpeg_compressibility.py",
        "+reward.reward_functions.a.weight=0.5",
        "+reward.reward_functions.hps.path=score/hpsv3.py",
    )
    assert [(term.name, term.weight) for term in found.reward.terms] == [
        ("jpeg_compressibility", 0.5),
        ("my_rewards:hps", 1.0),
    ]
    assert "my_rewards:NAME is yours to write" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.trainer_type=direct_preference", "is not policy_gradient"),
        (f"{OMNI}actor.diffusion_loss.loss_mode=diffusion_nft", "loss_mode=diffusion_nft has no equal here"),
        (f"{OMNI}rollout.pipeline.num_frames=81", "makes videos"),
        (f"{OMNI}model.path=Qwen/Qwen-Image-Edit", "of no family that flowcorr knows: sd3"),
        (f"{OMNI}rollout.n=1", "nothing to compare an image with"),
        (f"{OMNI}rollout.algo.sde_contiguous=False", "do not follow each other"),
        ("distillation.enabled=True", "learns from a teacher"),
        ("data.train_batch_size=8", "no update is whole"),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(omni, override, message):
    with pytest.raises(ConfigError, match=message):
        omni(override)


def test_a_hydra_yaml_with_interpolation(tmp_path):
    """As Hydra saves it, with what only its program could resolve left out."""
    values = {
        "defaults": ["_self_"],
        "actor_rollout_ref": {
            "model": {"path": "a/sd3", "algorithm": "grpo_guard", "external": "${missing.key}"},
            "actor": {
                "diffusion_loss": {"loss_mode": "${oc.select:actor_rollout_ref.model.algorithm,flow_grpo}"},
                "ppo_mini_batch_size": 4,
            },
            "rollout": {"n": 1, "name": "???"},
        },
        "data": {"train_batch_size": 4},
        "reward": {"reward_functions": {"ocr": {"path": "ocr.py", "weight": 2.0}}},
        "unheard_of": 1,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    text = translate(str(path), [f"{OMNI}rollout.n=4"])
    found = loaded(tmp_path, text)
    assert (found.actor.loss_mode, found.rollout.n, found.actor.mini_batches) == ("grpo_guard", 4, 1)
    assert found.reward.terms[0].weight == 2
    assert "# not known to flowcorr translate:\n#   unheard_of=1" in text


def test_flow_grpos_values(grpo, tmp_path):
    text = translate(f"{grpo}:get")
    found = loaded(tmp_path, text)
    assert (found.rollout.prompts_per_step, found.rollout.n, found.actor.mini_batches) == (16, 16, 2)
    assert (found.sampling.sde_window_size, found.sampling.sde_window_range) == (9, (0, 9))
    assert (found.actor.kl_coef, found.actor.kl_weighting) == (0.04, "flow_grpo")
    assert found.algorithm.rollout_correction.mode == "bypass"
    assert (found.sampling.guidance_scale, found.trainer.seed) == (4.5, 42)
    assert (found.model.dtype, found.data.heldout_path) == ("float16", "dataset/ocr/test.txt")
    assert [(term.name, term.weight) for term in found.reward.terms] == [
        ("pickscore", 1),
        ("my_rewards:geneval", 0.5),
    ]
    assert "population std" in text


def test_flow_grpo_needs_its_gpus(grpo, tmp_path):
    grpo.write_text(GRPO.replace("gpu_number = 4", "number = 4"), encoding="utf-8")
    with pytest.raises(ConfigError, match="give it by --gpus N"):
        translate(f"{grpo}:get")
    assert loaded(tmp_path, translate(f"{grpo}:get", gpus=2)).rollout.prompts_per_step == 8


@pytest.mark.parametrize("table", [VERL_OMNI, FLOW_GRPO])
def test_each_row_has_the_defaults_that_it_reads(table):
    assert {source for row in table.rows for source in row.sources} <= table.defaults.keys()


def test_the_command(grpo, tmp_path, capsys):
    assert main(["translate", f"{grpo}:get"]) == 0
    assert capsys.readouterr().out.startswith(
        "# Translated by flowcorr translate from grpo.py:get (flow_grpo)."
    )
    for source, message in (
        (str(grpo), "name one of its configurations, as"),
        (str(tmp_path / "none.sh"), "no such file"),
        (f"{grpo}:got", "did you mean get"),
    ):
        assert main(["translate", source]) == 2
        assert message in capsys.readouterr().err
