"""What needs no engine: requests, adapters, options and the probe's verdict."""

import json
import os
from dataclasses import replace

import pytest
import torch

from flowcorr.config.schema import Config, LoraConfig, ModelConfig, RolloutConfig, SamplingConfig
from flowcorr.errors import BackendError, ConfigError
from flowcorr.models import Schedule
from flowcorr.rollout.vllm_omni import adapter, environment, options
from flowcorr.rollout.vllm_omni.probe import MoveCheck, Velocities, disagreement, untrained
from flowcorr.rollout.vllm_omni.request import Job, Plan, Probe, from_extra

JOB = Job(
    plan=Plan(
        sampling=SamplingConfig(num_inference_steps=2, sde_window_range=(0, 2)),
        schedule=Schedule(sigmas=(1.0, 0.5, 0.0), timesteps=(1000.0, 500.0)),
        latent_shape=(4, 8, 8),
    ),
    seed=1, training_step=2, group=3, member=4, start=0, same_initial_noise=True, policy_version=5,
)  # fmt: skip


@pytest.mark.parametrize("job", [JOB, Probe(guidance_scale=1.0, true_cfg_scale=4.0)], ids=["job", "probe"])
def test_requests_survive_a_transport_of_plain_values(job):
    found = from_extra(json.loads(json.dumps(job.to_extra())))
    assert found == job
    assert hash(found) == hash(job)


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_foreign_requests_are_refused(extra):
    with pytest.raises(ValueError, match="training rollouts"):
        from_extra(extra)


def test_adapters_get_the_names_of_peft_and_of_the_engine():
    tensors = {
        "blocks.0.attn.to_out.0.lora_A.default.weight": torch.zeros(2, 3),
        "blocks.0.attn.to_out.0.lora_B.default.weight": torch.zeros(3, 2),
    }
    assert list(adapter.peft_tensors(tensors, "sd3")) == [
        "base_model.model.blocks.0.attn.to_out.0.lora_A.weight",
        "base_model.model.blocks.0.attn.to_out.0.lora_B.weight",
    ]
    assert "base_model.model.blocks.0.attn.to_out.lora_A.weight" in adapter.peft_tensors(
        tensors, "qwen_image"
    )
    config = adapter.peft_config(tensors, "qwen_image", rank=2, alpha=4.0)
    assert config["target_modules"] == ["blocks.0.attn.to_out"]
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)


def test_buckets_hold_everything_once_and_no_more_than_the_limit():
    state = {name: torch.full((size,), float(size)) for name, size in zip("abcd", (3, 4, 20, 1), strict=True)}
    parts = list(adapter.buckets(state.items(), torch.float32, limit=32))
    assert [list(part) for part in parts] == [["a", "b"], ["c"], ["d"]]
    (half,) = adapter.buckets(list(state.items())[:3], torch.bfloat16, limit=54)
    assert {name: tensor.dtype for name, tensor in half.items()} == dict.fromkeys("abc", torch.bfloat16)
    assert list(adapter.buckets([], torch.float32)) == []


FLOAT32, BFLOAT16 = (disagreement(RolloutConfig(dtype=dtype)) for dtype in ("float32", "bfloat16"))


def velocities(engine, actor):
    return Velocities(engine=torch.tensor(engine), actor=torch.tensor(actor))


def test_a_move_must_be_the_actors():
    start = velocities([1.0, 0.0], [1.0, 0.0])
    MoveCheck(start, disagreement=FLOAT32).check(velocities([1.0, 0.1], [1.0, 0.1]))
    for engine in ([1.0, 0.0], [1.0, -0.1], [1.0, 0.3]):
        with pytest.raises(BackendError, match="did not take effect"):
            MoveCheck(start, disagreement=FLOAT32).check(velocities(engine, [1.0, 0.1]))
    with pytest.raises(BackendError, match="did not take effect"):
        MoveCheck(start, disagreement=FLOAT32).check(velocities([1.0, float("nan")], [1.0, 0.1]))


def test_moves_within_the_noise_add_up_until_they_prove_something():
    checked = MoveCheck(velocities([1.0, 0.01], [1.0, 0.0]), disagreement=BFLOAT16)
    for step in (0.01, 0.02, 0.03):
        checked.check(velocities([1.0, 0.01], [1.0, step]))  # an engine that never moves
    with pytest.raises(BackendError, match="did not take effect"):
        checked.check(velocities([1.0, 0.01], [1.0, 0.05]))


def test_after_a_conclusive_move_the_next_is_counted_from_there():
    checked = MoveCheck(velocities([1.0, 0.0], [1.0, 0.0]), disagreement=FLOAT32)
    checked.check(velocities([1.0, 0.5], [1.0, 0.5]))
    with pytest.raises(BackendError, match="did not take effect"):
        checked.check(velocities([1.0, 0.5], [1.0, 0.55]))


def test_another_model_is_told_apart_before_training():
    with pytest.raises(BackendError, match="different models"):
        MoveCheck(velocities([0.0, 1.0], [1.0, 0.0]), disagreement=BFLOAT16)


def test_disagreement_follows_the_precision():
    kinds = [
        RolloutConfig(),
        RolloutConfig(dtype="bfloat16"),
        RolloutConfig(dtype="bfloat16", engine={"quantization": "fp8"}),
    ]
    most = [disagreement(kind)[1] for kind in kinds]
    assert most == sorted(set(most))
    assert FLOAT32[0] < BFLOAT16[0]


def test_kernels_that_agree_bit_for_bit_at_the_start_may_differ_by_rounding_later():
    for bounds, rounding in ((FLOAT32, 1e-6), (BFLOAT16, 3e-3)):
        checked = MoveCheck(velocities([1.0, 0.0], [1.0, 0.0]), disagreement=bounds)
        checked.check(velocities([1.0 + rounding, 0.0], [1.0, rounding / 4]))
        with pytest.raises(BackendError, match="did not take effect"):
            checked.check(velocities([1.0 + 8 * rounding, 0.0], [1.0, rounding]))


def test_an_untrained_adapter_has_no_effect():
    tensors = {"x.lora_A.default.weight": torch.ones(2, 2), "x.lora_B.default.weight": torch.ones(2, 2)}
    still = untrained(tensors)
    assert still["x.lora_A.default.weight"].all()
    assert not still["x.lora_B.default.weight"].any()


def config(engine, *, rank=4, **rollout):
    return Config(
        model=ModelConfig(lora=LoraConfig(rank=rank)),
        rollout=RolloutConfig(name="vllm_omni", engine=engine, **rollout),
    )


class Family:
    name = "flux"


INSTALLED = options.Installed(
    options={"max_num_seqs", "quantization", "tensor_parallel_size", "distributed_executor_backend"},
    backend="package.Lossless",
)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (config({"dtype": "float16"}), r"rollout\.engine\.dtype cannot be set: set rollout\.dtype"),
        (config({"max_num_seq": 4}), r"rollout\.engine='max_num_seq' is unknown.*max_num_seqs\?"),
        (config({"weight_sync": "lora"}), r"weight_sync='lora' is unknown"),
        (config({"weight_sync": "lora_path"}, rank=0), r"rank=0 trains all"),
        (config({"weight_sync": "merged", "quantization": "fp8"}), r"quantization='fp8'"),
        (config({}, emulate="int8"), r"rollout\.emulate='int8'"),
    ],
)
def test_options_that_cannot_be_passed_on(bad, message):
    with pytest.raises(ConfigError, match=message):
        options.engine_options(bad, Family(), INSTALLED)


def test_options_are_completed():
    found, way = options.engine_options(
        config({}, prompts_per_step=3, n=5, dtype="bfloat16"), Family(), INSTALLED
    )
    assert way == "lora_tensors"
    assert found["max_num_seqs"] == 15
    assert found["dtype"] == "bfloat16"
    assert found["model_class_name"] == "FlowcorrFluxPipeline"
    told, way = options.engine_options(config({"max_num_seqs": 2}, rank=0), Family(), INSTALLED)
    assert (told["max_num_seqs"], way) == (2, "merged")


def test_a_users_own_executor_is_taken_and_one_that_loses_answers_gets_a_warning(caplog):
    def backend(engine, installed=INSTALLED):
        return options.engine_options(config(engine), Family(), installed)[0]["distributed_executor_backend"]

    assert backend({}) == "package.Lossless"
    assert backend({"distributed_executor_backend": "mine.Executor"}) == "mine.Executor"
    assert backend({}, replace(INSTALLED, backend="mp")) == "mp"
    assert caplog.messages == []
    assert backend({"distributed_executor_backend": "mp"}) == "mp"
    assert "'mp' loses answers" in caplog.text


def test_families_without_a_pipeline_or_quantization():
    other, sd3 = Family(), Family()
    other.name, sd3.name = "aura_flow", "sd3"
    with pytest.raises(ConfigError, match="no pipeline for the model family aura_flow"):
        options.engine_options(config({}), other, INSTALLED)
    with pytest.raises(ConfigError, match="does not quantize sd3"):
        options.engine_options(config({"quantization": "fp8"}), sd3, INSTALLED)


def test_an_engine_of_several_gpus_is_refused_beside_other_ranks(monkeypatch):
    assert options.engine_options(config({"tensor_parallel_size": 2}), Family(), INSTALLED)
    monkeypatch.setattr(options.distributed, "world_size", lambda: 2)
    assert options.engine_options(config({"tensor_parallel_size": 1}), Family(), INSTALLED)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 takes several GPUs.*placement=ray"):
        options.engine_options(config({"tensor_parallel_size": 2}), Family(), INSTALLED)


@pytest.mark.parametrize(
    ("visible", "device", "ranks", "gpus", "theirs"),
    [
        ("4, 6,7", "cuda:2", 3, 1, "7"),  # no other: the trainer's
        (None, "cuda:2", 4, 1, "2"),
        ("4,5,6,7", "cuda:1", 2, 1, "7"),  # the ranks train on 4 and 5
        ("4", "cuda:0", 1, 1, "4"),
        ("4,6", "cuda", 1, 1, "6"),
        ("4,6", "cuda:1", 1, 1, "4"),
        ("4,5,6", "cuda:0", 1, 2, "5,6"),
        ("4,6", "cuda:0", 1, 2, "6,4"),
        ("4,6", "cpu", 2, 1, "4,6"),
    ],
)
def test_an_engine_is_none_of_the_trainers_ranks_and_takes_a_gpu_of_its_own_where_there_is_one(
    monkeypatch, visible, device, ranks, gpus, theirs
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = dict(os.environ)
    with environment.changed(environment.of_engine(torch.device(device), ranks, gpus)):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == theirs
        assert not {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & os.environ.keys()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "ulysses_degree": 2, "sequence_parallel_size": 2}, 4),
        ({"num_gpus": 8}, 8),
    ],
)
def test_an_engine_takes_as_many_gpus_as_it_is_spread_over(engine, gpus):
    assert options.num_gpus(engine) == gpus


def test_jobs_with_the_same_plan_may_share_a_batch():
    assert replace(JOB, member=1).plan == JOB.plan
    assert replace(JOB.plan, with_means=True) != JOB.plan
