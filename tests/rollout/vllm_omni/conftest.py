"""One engine for most tests: starting it costs more than all that they ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_pipelines import FAMILIES
from torch import Tensor

from tests.prompts import check_told_apart, prompts_of

if TYPE_CHECKING:
    from flowcorr.actor import DiffusionActor
    from flowcorr.config.schema import Config
    from flowcorr.models import ModelFamily
    from flowcorr.records import Prompt, Rollout
    from flowcorr.rollout import InProcessEngine
    from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine

PROMPTS = ("cat", "dog")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """An actor, and the real engine beside it."""

    config: Config
    family: ModelFamily
    actor: DiffusionActor
    engine: VllmOmniEngine
    conditioning: dict[str, Tensor]
    prompts: list[Prompt]

    def sample(self, groups: Sequence[int] = (0, 1), *, training_step: int = 1) -> Rollout:
        rows = {name: rows[list(groups)] for name, rows in self.conditioning.items()}
        return self.engine.sample(rows, groups, training_step=training_step, with_means=True)

    def stir(self, scale: float = 0.02, seed: int = 0) -> None:
        """Move the trained weights, as training would."""
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.actor.weights.parameters.values():
            parameter.data += scale * torch.randn(parameter.shape, generator=draw).to(parameter)
        self.actor.weights.version += 1

    def sync(self) -> None:
        self.engine.sync(self.actor.weights.snapshot())

    def mismatch(self, rollout: Rollout) -> Tensor:
        """|log-prob of the actor - log-prob of the engine|, nats per latent element."""
        return (self.actor.log_probs(rollout).log_probs - rollout.log_probs).abs()

    def in_process(self) -> InProcessEngine:
        """The same sampling in this process, with the actor's weights as they are."""
        from flowcorr.rollout import InProcessEngine

        rollout = replace(self.config.rollout, name="in_process", engine={})
        engine = InProcessEngine(
            self.family, rollout, self.config.sampling, seed=self.config.trainer.seed,
            merge=self.actor.weights.merged, base=self.actor.weights.untrained,
        )  # fmt: skip
        engine.sync(self.actor.weights.snapshot())
        return engine


def stack_config(path: str, family: str, *, dtype: str = "float32", **sections: dict[str, Any]) -> Config:
    from flowcorr.config.run import TrainerConfig
    from flowcorr.config.schema import (
        ActorConfig,
        Config,
        LoraConfig,
        ModelConfig,
        RolloutConfig,
        SamplingConfig,
    )

    # Twice as large as elsewhere: the noise of a log-prob in bfloat16 falls with the number of latents.
    height, width = (32, 64) if family == "tiny_ocr" else (2 * side for side in FAMILIES[family].size)
    frames = None if family == "tiny_ocr" else FAMILIES[family].frames
    sampling = {
        "height": height, "width": width, "num_frames": frames, "num_inference_steps": 5, "sde_window_range": (0, 3),
        **sections.get("sampling", {}),
    }  # fmt: skip
    rollout = {
        "name": "vllm_omni", "prompts_per_step": 2, "n": 4, "dtype": dtype, **sections.get("rollout", {}),
    }  # fmt: skip
    tokens = 8 if family == "tiny_ocr" else FAMILIES[family].tokens
    model = {"max_sequence_length": tokens, **sections.get("model", {})}
    return Config(
        model=ModelConfig(path=path, dtype=dtype, lora=LoraConfig(**sections.get("lora", {})), **model),
        sampling=SamplingConfig(**sampling),
        rollout=RolloutConfig(**rollout),
        actor=ActorConfig(mini_batches=1, **sections.get("actor", {})),
        trainer=TrainerConfig(device="cpu"),
    )


@contextlib.contextmanager
def running(config: Config, images: int | None = None, words: Sequence[str] = PROMPTS) -> Iterator[Stack]:
    """The engine that `config` asks for, synchronised with a new actor; `images` are those of a prompt."""
    from flowcorr.actor import DiffusionActor
    from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine
    from flowcorr.rollout.vllm_omni.probe import actor_probe
    from flowcorr.trainer.setup import load_model

    family = load_model(config)
    actor = DiffusionActor(family, config)
    prompts = prompts_of(words, images=FAMILIES[family.name].images if images is None else images)
    check_told_apart(family, prompts, actor.guidance)
    conditioning = family.encode(prompts, actor.guidance)
    engine = VllmOmniEngine(
        family,
        config,
        actor_probe=actor_probe(family, config, actor.weights.snapshot().tensors, prompts[0].images),
        merge=actor.weights.merged,
    )
    try:
        stack = Stack(
            config=config,
            family=family,
            actor=actor,
            engine=engine,
            conditioning=conditioning,
            prompts=prompts,
        )
        stack.sync()
        yield stack
    finally:
        engine.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[tuple[Stack, dict[str, Tensor]]]:
    with running(stack_config("tiny_ocr", "tiny_ocr")) as stack:
        yield stack, stack.actor.weights.snapshot().tensors


@pytest.fixture
def stack(shared: tuple[Stack, dict[str, Tensor]]) -> Iterator[Stack]:
    """The embedded model in float32, in an engine of its own process, at its initial weights."""
    stack, initial = shared
    stack.actor.weights.load(initial)
    stack.engine.weight_sync = "lora_tensors"
    stack.sync()
    return stack


@pytest.fixture(scope="session")
def shared_guided() -> Iterator[tuple[Stack, dict[str, Tensor]]]:
    sampling = {"guidance_scale": 3.0}
    with running(stack_config("tiny_ocr", "tiny_ocr", sampling=sampling)) as stack:
        yield stack, stack.actor.weights.snapshot().tensors


@pytest.fixture
def guided(shared_guided: tuple[Stack, dict[str, Tensor]]) -> Stack:
    """As `stack`, with guidance and an adapter that has learned something."""
    stack, initial = shared_guided
    stack.actor.weights.load(initial)
    stack.stir()
    stack.sync()
    return stack


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Start a further engine, in this process: on `tiny_ocr`, or on a tiny pipeline with random weights."""
    with contextlib.ExitStack() as engines:

        def enter(
            family: str,
            *,
            dtype: str = "float32",
            backend: str = "uni",
            rollout: Mapping[str, Any] | None = None,
            images: int | None = None,
            **sections: Any,
        ) -> Stack:
            from flowcorr.models import DTYPES

            path: str | Path = family
            asked = rollout or {}
            engine = {"distributed_executor_backend": backend, **asked.get("engine", {})}
            if family != "tiny_ocr":
                path = FAMILIES[family].build(tmp_path / family, DTYPES[dtype])
                engine = {**FAMILIES[family].engine, **engine}
            config = stack_config(
                str(path), family, dtype=dtype, rollout={**asked, "engine": engine}, **sections
            )
            return engines.enter_context(running(config, images))

        yield enter
