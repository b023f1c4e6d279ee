"""The options of `rollout.engine`: checked, completed, and refused."""

from dataclasses import replace

import pytest

from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.schema import Config, LoraConfig, ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models.flux import Flux
from flowcorr.models.sd3 import SD3
from flowcorr.rollout.vllm_omni import options


def config(engine, *, rank=4, **rollout):
    return Config(
        model=ModelConfig(lora=LoraConfig(rank=rank)),
        rollout=RolloutConfig(name="vllm_omni", engine=engine, **rollout),
    )


class Family:
    name = "flux"
    vllm_omni = Flux.vllm_omni
    lora_targets = Flux.lora_targets


INSTALLED = options.Installed(
    options={"max_num_seqs", "quantization", "tensor_parallel_size", "distributed_executor_backend"},
    backend="package.Lossless",
)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (config({"dtype": "float16"}), r"rollout\.engine\.dtype .*: set rollout\.dtype"),
        (config({"cache_backend": "cache_dit"}), r"rollout\.engine\.cache_backend .*stochastic steps"),
        (config({"max_num_seq": 4}), r"rollout\.engine='max_num_seq' .*max_num_seqs\?"),
        (config({"linear_backend": "x"}), r"rollout\.engine\.linear_backend .*vllm-omni 0\.32\.0rc1"),
        (config({"weight_sync": "lora"}), r"weight_sync='lora' .* lora_tensors, lora_path, merged$"),
        (config({"weight_sync": "lora_path"}, rank=0), r"weight_sync='lora_path' .*model\.lora\.rank=0 "),
        (
            config({"weight_sync": "merged", "quantization": "fp8"}),
            r"weight_sync='merged' .*quantization='fp8'",
        ),
        (config({}, emulate="int8"), r"rollout\.emulate='int8' .*weight_sync=merged"),
    ],
)
def test_options_that_cannot_be_passed_on(bad, named):
    with pytest.raises(ConfigError, match=named):
        options.engine_options(bad, Family(), INSTALLED)


def test_options_are_completed():
    found, way = options.engine_options(
        config({}, prompts_per_step=3, n=5, dtype="bfloat16"), Family(), INSTALLED
    )
    assert way == "lora_tensors"
    assert found["max_num_seqs"] == 15
    assert found["dtype"] == "bfloat16"
    assert found["model_class_name"] == "FlowcorrPipeline"
    assert found["custom_pipeline_args"] == {"flowcorr_family": f"{__name__}:Family"}
    told, way = options.engine_options(config({"max_num_seqs": 2}, rank=0), Family(), INSTALLED)
    assert (told["max_num_seqs"], way) == (2, "merged")


def test_an_executor_of_ones_own_is_taken_and_a_lossy_one_warned_of(caplog):
    def backend(engine, installed=INSTALLED):
        return options.engine_options(config(engine), Family(), installed)[0]["distributed_executor_backend"]

    assert backend({}) == "package.Lossless"
    assert backend({"distributed_executor_backend": "mine.Executor"}) == "mine.Executor"
    assert backend({}, replace(INSTALLED, backend="mp")) == "mp"
    assert caplog.messages == []
    assert backend({"distributed_executor_backend": "mp"}) == "mp"
    assert "'mp'" in caplog.text


def test_families_without_a_pipeline_or_quantization():
    other, sd3 = Family(), Family()
    other.name, other.vllm_omni = "aura_flow", None
    sd3.name, sd3.vllm_omni = "sd3", SD3.vllm_omni
    with pytest.raises(ConfigError, match=r"family aura_flow, .* sd3, qwen_image, .*Family\.vllm_omni"):
        options.engine_options(config({}), other, INSTALLED)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.quantization='fp8' .* sd3$"):
        options.engine_options(config({"quantization": "fp8"}), sd3, INSTALLED)


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        (("to_q", "attn.to_k", "blocks.0.attn.to_q"), ""),
        (("attn.to_q", "to_out.0", "ff.net.2"), r"to_out\.0, ff\.net\.2"),
        (("into_q",), "into_q"),
    ],
)
def test_layers_that_take_no_adapter_in_the_engine_need_merged_weights(targets, refused):
    family = Family()
    family.lora_targets = targets
    family.vllm_omni = replace(Flux.vllm_omni, adapted_layers=("to_q", "to_k"))
    assert options.engine_options(config({"weight_sync": "merged"}), family, INSTALLED)[1] == "merged"
    if not refused:
        assert options.engine_options(config({}), family, INSTALLED)[1] == "lora_tensors"
        return
    with pytest.raises(ConfigError, match=rf"layers {refused} .*weight_sync=merged"):
        options.engine_options(config({}), family, INSTALLED)
    chosen = replace(config({}), model=ModelConfig(lora=LoraConfig(targets=("to_q",))))
    assert options.engine_options(chosen, family, INSTALLED)[1] == "lora_tensors"


def test_an_engine_of_several_gpus_is_refused_beside_other_ranks(monkeypatch):
    assert options.engine_options(config({"tensor_parallel_size": 2}), Family(), INSTALLED)
    monkeypatch.setattr(options.distributed, "world_size", lambda: 2)
    assert options.engine_options(config({"tensor_parallel_size": 1}), Family(), INSTALLED)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*rollout\.placement=ray"):
        options.engine_options(config({"tensor_parallel_size": 2}), Family(), INSTALLED)


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
