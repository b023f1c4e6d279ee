"""How a run samples: engine, precision, age of the weights, and the images of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowcorr.config.checks import at_least, at_most, check_workers, within
from flowcorr.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
Placement = Literal["local", "ray"]

_MOST_PROMPTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """`rollout`: the engine that samples.

    Attributes:
        name: `in_process` samples with diffusers in the trainer's process; `vllm_omni` with that engine;
            `package.module:name` with an engine of your own.
        engine: options of the engine; `in_process` has none. `weight_sync` says how vllm-omni gets new weights:
            `lora_tensors` in memory (default), `lora_path` through files, or `merged`, all weights (default and
            only choice for `model.lora.rank: 0`). The rest passes through to it, such as `tensor_parallel_size`,
            `quantization`, `diffusion_attention_config`, `gpu_memory_utilization` or `enable_sleep_mode`.
        placement: `local` samples in the trainer's process; `ray` in workers of their own, each with its own engine.
        num_workers: rollout workers, which all training ranks share.
        worker_resources: Ray resources reserved for each worker, such as `{num_cpus: 1, num_gpus: 1}` or your own; a
            worker computes on a GPU if it has one here.
        ray_address: the Ray cluster to join; null takes `RAY_ADDRESS`, and without that starts a local cluster.
        scheduling: Ray's placement of the workers: `default`, `spread` over nodes, or the id of one node.
        timeout: seconds that a worker may take for its share of the prompts; it then counts as hung, and is replaced.
            An engine with processes of its own may be silent as long; the run then ends with an error.
        max_staleness: sampling overlaps with training and runs this many training steps ahead, with weights that are as
            many steps old; 0 alternates. It needs `placement: ray`.
        dtype: dtype of the engine's weights and arithmetic.
        emulate: round the engine's weights to this format, which produces a real mismatch on any machine.
        staleness: sample with weights that are this many training steps old, to study staleness.
        drift_every: with stale weights, training steps between measurements that split the gap into the part of the
            engine and the part of older weights; each costs a recompute pass (two in bypass mode); 0 is off.
        replay_every: training steps between replays of a few whole images with the training stack, for differences that
            log-probs cannot show, see `rollout_corr/replay/*`. The first step has one too, and any other decodes one
            image again; 0 is off.
        prompts_per_step: prompts (groups) a training step, of all ranks together.
        n: images or videos per prompt.
        n_learned: learn from only so many of the `n`, of each prompt those whose rewards vary most: the highest and the
            lowest; null learns from all. Only these are recomputed, corrected and learned from, and their advantages
            compare them with each other. Rewards are computed of all, and before the recompute. It is another
            objective: PODS, arXiv:2504.13818.
        batch_size: images a forward pass, in an evaluation too (64 at the most); null samples all of a step at once, or
            on a CPU at most 5,000 tokens a thread. With less, rewards in a thread begin earlier. With `placement: ray`
            it is also the size of a worker's request, in whole prompts; null is one prompt.
        same_initial_noise: all images of a prompt start from one noise. Their steps up to the first SDE step are then
            equal, and computed once: in the rollout of `in_process`, and in the trainer's passes of any engine.
        calculate_log_probs: verl's key: false says that there is no correction. Engines score their steps in any case.
    """

    name: str = "in_process"
    engine: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = "local"
    num_workers: int = 1
    worker_resources: Mapping[str, float] = field(default_factory=dict)
    ray_address: str | None = None
    scheduling: str = "default"
    timeout: float = 900.0
    max_staleness: int = 0
    dtype: Dtype = "float32"
    emulate: Literal["none", "fp8", "int8", "int4"] = "none"
    staleness: int = 0
    drift_every: int = 10
    replay_every: int = 10
    prompts_per_step: int = 8
    n: int = 12
    n_learned: int | None = None
    batch_size: int | None = None
    same_initial_noise: bool = True
    calculate_log_probs: bool = True

    @property
    def evaluation_batch_size(self) -> int:
        """Images of a forward pass of an evaluation."""
        return min(64, self.batch_size or 64)

    @property
    def learned_per_prompt(self) -> int:
        """Images of a prompt that an update learns from."""
        return self.n if self.n_learned is None else self.n_learned

    def __post_init__(self) -> None:
        at_least("rollout.staleness", self.staleness, 0)
        at_least("rollout.drift_every", self.drift_every, 0)
        at_least("rollout.replay_every", self.replay_every, 0)
        within("rollout.prompts_per_step", self.prompts_per_step, 1, _MOST_PROMPTS)
        at_most("rollout.n", self.n, _MOST_PROMPTS)
        if self.n < 2:
            raise ConfigError(
                f"rollout.n={self.n} leaves every advantage at 0: an image is compared with the others of its "
                "prompt; use at least 2, usually 8 to 24"
            )
        if self.n_learned is not None and not 2 <= self.n_learned <= self.n:
            raise ConfigError(
                f"rollout.n_learned={self.n_learned} is out of range: of the rollout.n={self.n} images of a prompt, an "
                f"update may learn from 2 to {self.n}; sample more (rollout.n), or use null to learn from all"
            )
        if self.batch_size is not None:
            at_least("rollout.batch_size", self.batch_size, 1)
        check_workers("rollout", self.num_workers, self.worker_resources, self.timeout)
        if self.scheduling not in ("default", "spread") and not re.fullmatch("[0-9a-f]{56}", self.scheduling):
            raise ConfigError(
                f"rollout.scheduling={self.scheduling!r} is unknown; choose from default, spread, or the id of a node "
                "(56 hexadecimal digits, as ray.nodes() lists it)"
            )
        at_least("rollout.max_staleness", self.max_staleness, 0)
        if self.max_staleness and self.placement != "ray":
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness} needs workers that sample while the trainer trains; set "
                "rollout.placement=ray, or rollout.staleness to sample with old weights in the trainer's process"
            )
        if self.max_staleness and self.staleness:
            raise ConfigError(
                f"rollout.staleness={self.staleness} imitates what rollout.max_staleness={self.max_staleness} does; "
                "set only one of them"
            )

    @property
    def max_weight_age(self) -> int:
        """How many training steps old the weights that sample are, except at the start of a run."""
        return self.staleness or self.max_staleness
