"""What verl-omni's keys mean together."""

import re

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.families import TRANSLATED
from tests.translate.configs import OMNI

OPTIM, PATH, FUNCTIONS = f"{OMNI}actor.optim", "reward.custom_reward_function", "reward.reward_functions"
SEVERAL = "reward.reward_manager.name=MultiVisualRewardManager"


def rewards(found):
    return [(term.name, term.weight, dict(term.options)) for term in found.reward.terms]


@pytest.mark.parametrize(
    ("path", "term"),
    [
        ("verl_omni/utils/reward_score/jpeg_compressibility.py", ("jpeg_compressibility", 1 / 500, {})),
        ("pkg://verl_omni.utils.reward_score.pickscore_reward", ("pickscore", 1, {})),
        ("score/ocr_server.py", ("my_rewards:ocr_server", 1, {})),
        ("score/hps.py", ("my_rewards:hps", 1, {})),
        ("null", ("jpeg_compressibility", 1 / 500, {})),  # the only one that its data can choose
    ],
)
def test_a_reward_by_its_file(omni, path, term):
    found, _ = omni(f"{PATH}.path={path}", f"{PATH}.name=compute_score")
    assert rewards(found) == [term]


def test_several_rewards_keep_their_weights_options_and_address(omni):
    found, text = omni(
        SEVERAL,
        f"+{FUNCTIONS}.jpeg.path=/root/score/jpeg_compressibility.py",
        f"+{FUNCTIONS}.jpeg.weight=0.5",
        f"+{FUNCTIONS}.jpeg.required=true",
        f"+{FUNCTIONS}.ocr.path=pkg://score.http_scorer_client",
        f"+{FUNCTIONS}.ocr.server_url=http://localhost:19082",
        f"+{FUNCTIONS}.judge.path=score/genrm_ocr.py",
        f"+{FUNCTIONS}.judge.frames=2",
    )
    assert rewards(found)[:2] == [
        ("jpeg_compressibility", 0.001, {}),
        ("my_rewards:ocr", 1.0, {"server_url": "http://localhost:19082"}),
    ]
    assert rewards(found)[2][2]["model"] == "judges/vision"
    assert "write my_rewards:NAME yourself" in text
    assert "kB / 500 there, kB here" in text
    assert "without reward.reward_functions.judge.frames" in text


def test_arguments_of_the_one_reward_are_its_options(omni):
    found, _ = omni(f"{PATH}.path=score/hps.py", f"+{PATH}.reward_kwargs.device=cpu")
    assert rewards(found) == [("my_rewards:hps", 1, {"device": "cpu"})]


def test_a_reward_of_latents_is_named(omni):
    _, text = omni(f"{PATH}.path=score/latent.py", f"+{OMNI}rollout.pipeline.output_type=latent")
    assert f"{OMNI}rollout.pipeline.output_type=latent scores latents there, images here" in text


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((SEVERAL,), "^reward.reward_functions is empty, .*name=MultiVisual"),
        (
            (SEVERAL, f"+{FUNCTIONS}.a.weight=1"),
            "^reward.reward_functions.a={'weight': 1} .* path ",
        ),
        (
            (SEVERAL, f"+{FUNCTIONS}.a.path=b.py", f"+{FUNCTIONS}.a.weight=x"),
            r"^reward\.reward_functions\.a\.weight='x' .* number",
        ),
        (
            ("reward.reward_model.model_path=null",),
            "^reward.reward_model.model_path is not set, .*genrm_ocr.py",
        ),
        (
            (f"{OMNI}model.target_modules=to_q",),
            r"model\.target_modules=to_q .* \['to_q','to_k'\]",
        ),
        (
            (f"{OMNI}model.target_modules='to_q,to_k'",),
            r"model\.target_modules=to_q,to_k .* \['to_q','to_k'\]",
        ),
        ((f"{OMNI}actor.fsdp_config.model_dtype=int8",), "model_dtype='int8' .* no, fp32, "),
        (
            (f"{OMNI}rollout.algo.sde_window_range=[1]",),
            r"sde_window_range=\[1\] .* 2 numbers",
        ),
        (("data.train_files=[a,b]",), r"^data\.train_files=\['a', 'b'\] .* one file"),
        (("data.val_files=null",), r"^data\.val_files is not set;"),
    ],
)
def test_values_that_cannot_be_told_are_refused(omni, overrides, named):
    with pytest.raises(ConfigError, match=named):
        omni(*overrides)


def test_every_linear_layer_by_its_name(omni):
    found, text = omni(f"{OMNI}model.target_modules=all-linear")
    assert found.model.lora.targets == TRANSLATED["qwen_image"].linear_layers
    assert re.search(
        r"targets: .*  # actor_rollout_ref\.model\.target_modules, .* \(all-linear is every linear layer\)\n",
        text,
    )


def test_an_adapter_has_the_dtype_of_the_weights_unless_it_is_set(omni):
    with pytest.raises(UserWarning, match=r"model\.lora\.dtype=bfloat16 "):
        omni(f"{OMNI}model.lora_dtype=null")


def test_a_warm_up_counts_training_steps(omni):
    """Two updates a step here, of 16 prompts, in each of 3 passes."""
    for override in (f"{OPTIM}.lr_warmup_steps=30", f"{OPTIM}.lr_warmup_steps_ratio=0.1"):
        found, _ = omni(override, f"{OMNI}actor.ppo_epochs=3")
        assert found.actor.warmup_steps == 30 * 2 * 3


@pytest.mark.parametrize("steps", [-1, 0])
def test_without_steps_of_a_warm_up_its_ratio_counts_rounded_down(omni, steps):
    """Of 300 training steps; two updates a step."""
    found, _ = omni(f"{OPTIM}.lr_warmup_steps={steps}", f"{OPTIM}.lr_warmup_steps_ratio=0.0159")
    assert found.actor.warmup_steps == 4 * 2


def test_veomni_has_a_dtype_of_its_own(omni):
    found, text = omni("model_engine=veomni_diffusion", f"{OMNI}actor.veomni_config.model_dtype=float32")
    assert (found.model.dtype, found.actor.autocast) == ("float32", True)
    assert "(of veomni_config with VeOmni)" in text


def test_trackers_that_flowcorr_lacks_are_named(omni):
    found, text = omni("trainer.logger=[console,wandb,trackio]")
    assert found.trainer.trackers == ("wandb",)
    assert "(without trackio)" in text


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((f"{OMNI}model.lora_init_weights=pissa",), "lora_init_weights=pissa "),
        ((f"{OMNI}model.exclude_modules=img_in",), "exclude_modules=img_in "),
        ((f"{OMNI}rollout.pipeline.num_frames=81",), "num_frames=81 .*videos"),
        ((f"{OMNI}model.path=black-forest-labs/FLUX.1-dev",), "path=.*/FLUX.1-dev .*: sd3, qwen_image;"),
        ((f"{OMNI}rollout.name=null",), "rollout.name is not set, "),
        ((f"{OMNI}rollout.n=1",), "rollout.n=1 .* 2 or more"),
        (
            ("trainer.total_training_steps=null",),
            "^trainer.total_training_steps is not set, .* total_epochs=30 ",
        ),
        (
            ("data.train_batch_size=8",),
            "^data.train_batch_size=8 .*ppo_mini_batch_size=16 ",
        ),
        (("data.train_batch_size=24",), "^data.train_batch_size=24 .*ppo_mini_batch_size=16 "),
        ((f"{OMNI}actor.ppo_mini_batch_size=0",), "ppo_mini_batch_size=0 .* 1 "),
        (
            (f"{OMNI}model.algorithm=flow_dppo", f"{OMNI}actor.diffusion_loss.add_kl_coefficient=False"),
            "add_kl_coefficient=false .*exact KL",
        ),
        (
            (f"{OMNI}model.algorithm=grpo_guard", f"{OMNI}rollout.algo.sde_type=cps"),
            "sde_type=cps .*grpo_guard .* sde ",
        ),
        (
            (f"{OMNI}model.algorithm=flow_dppo", f"{OMNI}rollout.algo.sde_type=dance_sde"),
            "sde_type=dance_sde .*flow_dppo .* sde ",
        ),
        (
            ("trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async"),
            "^trainer.v1.separate_async.parameter_sync_step=4 .* 1 ",
        ),
        (
            (f"{OMNI}actor.strategy=veomni", f"{OPTIM}.lr_scheduler_type=cosine"),
            "lr_scheduler_type=cosine .* constant ",
        ),
        (
            (f"{OPTIM}.lr_scheduler_type=linear",),
            "lr_scheduler_type=linear .* constant ",
        ),
        ((f"{OPTIM}.lr_warmup_steps_ratio=.nan",), "lr_warmup_steps_ratio=nan .*finite"),
        ((f"{OMNI}actor.fsdp_config.dtype=fp16",), "dtype=fp16 with weights of bfloat16 "),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(omni, overrides, named):
    with pytest.raises(ConfigError, match=named):
        omni(*overrides)


def test_keys_of_adapters_count_with_an_adapter_only(omni):
    found, _ = omni(
        f"{OMNI}model.lora_rank=0",
        f"{OMNI}actor.fsdp_config.model_dtype=fp32",
        f"{OMNI}model.lora_init_weights=pissa",
        f"{OMNI}model.target_modules=all-linear",
    )
    assert found.model.lora.rank == 0
