"""The rollout engine `vllm_omni`, as the trainer uses it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr import distributed
from flowcorr.config.schema import Config
from flowcorr.devices import empty_cache
from flowcorr.errors import BackendError
from flowcorr.models import DTYPES, ModelFamily, SamplingPlan, resolve_path
from flowcorr.records import Rollout, Window
from flowcorr.rollout.base import AS_SENT, Merge, OnImages, SyncedWeights, Weights, ignore_images
from flowcorr.rollout.emulate import round_weight
from flowcorr.rollout.vllm_omni import adapter, environment, probe
from flowcorr.rollout.vllm_omni.client import OmniClient
from flowcorr.rollout.vllm_omni.options import engine_options, num_gpus
from flowcorr.rollout.vllm_omni.request import CONDITIONING, LATENTS, TIMESTEP, Job, Plan, Probe

logger = logging.getLogger(__name__)


class VllmOmniEngine(SyncedWeights):
    """Samples in vllm-omni's own processes, one request for each image.

    Only the transformer and the decoder are the engine's. Conditioning, sigmas, noise, windows and the sampling
    loop are the actor's, so that they cannot cause a gap between the two.

    Args:
        family: the model's pipeline; it needs no text encoders.
        config: the run's configuration.
        actor_probe: the actor's velocities, which the engine's must follow after each sync.
        merge: see `Merge`.

    Attributes:
        client: the running engine.
        weight_sync: the way in which new weights travel, see `rollout.engine`.
        sleeps: the engine is on the device only while it loads weights or samples.

    Raises:
        ConfigError: `rollout.engine` holds an option that cannot be set.
        MissingExtraError: vllm-omni is not installed.
        BackendError: the engine does not start, or its model differs from the actor's.
    """

    def __init__(
        self,
        family: ModelFamily,
        config: Config,
        *,
        actor_probe: probe.ActorProbe,
        merge: Merge,
    ) -> None:
        super().__init__(config.rollout.staleness)
        self.family = family
        self.config = config
        self._dtype = DTYPES[config.rollout.dtype]
        self.plan = SamplingPlan.of(family, config.sampling)
        options, self.weight_sync = engine_options(config, family)
        self.sleeps = bool(options.get("enable_sleep_mode"))
        self._merge = merge
        self._adapter_id = 0
        self._sent: dict[str, int] = {}
        self._own_digest: int | None = None
        self._has_warned = False
        self._probe = actor_probe
        self._folder = tempfile.TemporaryDirectory(prefix="flowcorr-vllm-omni-")
        log = Path(self._folder.name) / "engine.log"
        surroundings = environment.of_engine(self._device, distributed.ranks_here(), num_gpus(options))
        try:
            self.client = OmniClient(
                resolve_path(config.model.path), options, log, surroundings, timeout=config.rollout.timeout
            )
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            with self._awake():
                velocity = self._velocity()
            start = probe.Velocities(engine=velocity, actor=actor_probe.start)
            self._moves = probe.MoveCheck(
                start, rounding=actor_probe.rounding, largest_gap=actor_probe.largest_gap
            )
        except BaseException:
            self.close()
            raise

    @property
    def _device(self) -> torch.device:
        """The device on which the actor trains."""
        return next(self.family.transformer.parameters()).device

    # Weights ---------------------------------------------------------------------------------------------

    def _load(self, weights: Weights) -> None:
        """Load weights, and check that they arrived.

        Raises:
            BackendError: the engine refused the weights or holds others; or no digest tells which it holds, and its
                velocity did not change as the actor's did.
        """
        with self._awake():
            if self.weight_sync == "merged":
                is_proven = self._load_transformer(weights.tensors)
            else:
                self._load_adapter(weights.tensors)
                is_proven = True  # by the digests below
            velocity = self._velocity()
            self._check_adapter()
        moves = self._moves.contradiction(
            probe.Velocities(engine=velocity, actor=self._probe.velocity(weights))
        )
        if moves is not None and not is_proven:
            raise BackendError(
                f"a sync that did not take effect: {moves}; the engine still samples with other weights: try "
                "rollout.engine.weight_sync=lora_tensors, or lora_path"
            )
        if moves is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the engine holds the weights that were sent, as their digests tell, and computes otherwise with "
                "them: %s; flowcorr doctor says how",
                moves,
            )
        self._loaded = weights

    def _load_transformer(self, tensors: Mapping[str, Tensor]) -> bool:
        """Load the merged weights; returns whether a digest proves that the engine holds them."""
        emulate = self.config.rollout.emulate
        expected = 0

        def rounded() -> Iterator[tuple[str, Tensor]]:
            nonlocal expected
            for name, value in self._merge(tensors):
                sent = round_weight(value, emulate).to(self._dtype)
                expected += adapter.digest(sent)
                yield name, sent

        for bucket in adapter.buckets(rounded(), self._dtype):
            self.client.rpc("flowcorr_transformer", tensors=bucket)
        return self._check_transformer(expected)

    def _load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        lora = self.config.model.lora
        assert self.family.vllm_omni is not None, "an engine of a family without a pipeline is refused"
        suffix = self.family.vllm_omni.layer_suffix
        config = adapter.peft_config(tensors, suffix, rank=lora.rank, alpha=lora.alpha)
        named: dict[str, Tensor] | None = adapter.peft_tensors(tensors, suffix)
        self._adapter_id += 1
        self._sent = adapter.adapter_digests(tensors, suffix, self._dtype, rank=lora.rank, alpha=lora.alpha)
        folder = None
        if self.weight_sync == "lora_path":
            folder = Path(self._folder.name) / str(self._adapter_id)
            adapter.write_adapter(folder, named or {}, config)
            named = None
        try:
            self.client.rpc(
                "flowcorr_adapter",
                adapter_id=self._adapter_id,
                path=None if folder is None else str(folder),
                tensors=named,
                config=config,
            )
        except BackendError as error:
            raise BackendError(
                "the engine did not load the adapter; if some of its layers take none there, set "
                "rollout.engine.weight_sync=merged, or leave them out of model.lora.targets. This is its answer: "
                f"{error}"
            ) from error
        if folder is not None:
            shutil.rmtree(folder)

    def _check_adapter(self) -> None:
        """Check by its digests that the engine computes with the adapter that was sent last.

        Raises:
            BackendError: it computes with another one, or with none.
        """
        if self._adapter_id == 0:
            return
        differing = adapter.differing(self._sent, self.client.rpc("flowcorr_held_adapter"))
        if differing:
            raise BackendError(
                f"a sync that did not take effect: {len(differing)} of {len(self._sent)} tensors of the adapter differ "
                f"in the engine from those that were sent, {differing[0]} among them; try "
                "rollout.engine.weight_sync=merged, or lora_path, and check that no request names another adapter"
            )

    def _check_transformer(self, expected: int) -> bool:
        """Check by a digest that the engine's parameters changed, since the last sync, as the sent tensors did.

        Parameters that the engine alone has cancel in the change. Workers that share a transformer have parameters in
        common, so that their digests do not add up to one; then the velocities alone tell.

        Args:
            expected: the digest of all tensors that were sent.

        Returns:
            Whether the digest tells: not at the first sync, nor of several workers.

        Raises:
            BackendError: they did not.
        """
        workers = self.client.rpc("flowcorr_held_transformer")
        own = workers[0]["digest"] - expected
        tells = len(workers) == 1 and self._own_digest is not None
        if tells and (own - self._own_digest) % 2**64:
            raise BackendError(
                "a sync that did not take effect: the engine's parameters are not those that were sent; try "
                "rollout.engine.weight_sync=lora_tensors, or lora_path"
            )
        self._own_digest = own
        return tells

    def _velocity(self) -> Tensor:
        """The engine's velocity at the probe's point, under the weights that are loaded."""
        point, guidance = self._probe.point, self.plan.guidance
        prompt = {
            "prompt": "",
            CONDITIONING: self._cast(point.conditioning),
            LATENTS: point.latents,
            TIMESTEP: point.timestep,
        }
        extra = Probe(
            guidance_scale=guidance.guidance_scale, true_cfg_scale=guidance.true_cfg_scale
        ).to_extra()
        (output,) = self.client.generate([(prompt, self._params(extra))])
        return _trajectory(output)["velocity"].float()

    # Sampling --------------------------------------------------------------------------------------------

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        on_images: OnImages = ignore_images,
    ) -> Rollout:
        """See `RolloutEngine.sample`; samples come group by group, in the order of `groups`.

        Raises:
            BackendError: a request failed or was not answered in time, the engine died, or it sampled with another
                adapter than that of the last sync.
        """
        count = self.config.rollout.n
        jobs = self.jobs(groups, training_step, with_means)
        cpu = self._cast(conditioning)
        requests = [
            self.request(job, {name: rows[place // count] for name, rows in cpu.items()})
            for place, job in enumerate(jobs)
        ]
        with self._awake():
            outputs = self.client.generate(requests)
            self._check_adapter()  # of these requests, each of which names one
        own = torch.arange(len(groups)).repeat_interleave(count)
        rollout = _rollout(outputs, jobs, conditioning, own)
        on_images(rollout.decoded)
        return rollout.to(self._device)

    def jobs(self, groups: Sequence[int], training_step: int, with_means: bool) -> list[Job]:
        """All samples of `groups`: `rollout.n` a group, in the order of `groups`."""
        rollout, seed = self.config.rollout, self.config.trainer.seed
        owners = [int(group) for group in groups for _ in range(rollout.n)]
        members = [member for _ in groups for member in range(rollout.n)]
        windows = self.plan.windows(owners, members, seed=seed, training_step=training_step)
        plan = Plan(
            sampling=self.plan.sampling,
            schedule=self.family.in_dtype(self.plan.schedule, self._dtype),
            latent_shape=self.plan.latent_shape,
            with_means=with_means,
        )
        return [
            Job(
                plan=plan,
                seed=seed,
                training_step=training_step,
                group=group,
                member=member,
                window=tuple(window),
                same_initial_noise=rollout.same_initial_noise,
                policy_version=self.version,
            )
            for group, member, window in zip(owners, members, windows.tolist(), strict=True)
        ]

    def request(self, job: Job, conditioning: Mapping[str, Tensor]) -> tuple[dict[str, Any], Any]:
        """One sample's prompt and sampling parameters, as `OmniClient.generate` takes them.

        Args:
            job: the sample.
            conditioning: the rows of its prompt, on the CPU.
        """
        return {"prompt": "", CONDITIONING: dict(conditioning)}, self._params(job.to_extra())

    def _params(self, extra: Mapping[str, Any]) -> Any:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        return OmniDiffusionSamplingParams(
            num_inference_steps=len(self.plan.schedule.timesteps),
            seed=0,  # noise comes from flowcorr's own generators
            extra_args=dict(extra),
            lora_request=self._lora_request(),
        )

    def _lora_request(self) -> Any:
        """The adapter with which a request samples; None samples with the base weights."""
        if self._adapter_id == 0:
            return None
        from flowcorr.rollout.vllm_omni.worker import lora_request

        return lora_request(self._adapter_id)

    def _cast(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Conditioning on the CPU in the engine's dtype; bfloat16 halves the size of a request."""
        return {
            name: rows.to("cpu", self._dtype if rows.is_floating_point() else None)
            for name, rows in conditioning.items()
        }

    # Lifecycle -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """The attention backend and dtype of the engine's first worker, and whether digests prove its adapter."""
        held = {} if self.weight_sync == "merged" else {"weights": AS_SENT}
        return {**self.client.rpc("flowcorr_facts")[0], **held}

    def close(self) -> None:
        """Stop the engine's processes."""
        self.client.close()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """In sleep mode, move the engine to the device inside this context, and back to main memory afterwards.

        A sync and the rollout after it wake the engine separately, because an evaluation may come between them. After
        an error the engine stays on the device.
        """
        if self.sleeps:
            empty_cache(self._device)
            self.client.wake_up()
        yield
        if self.sleeps:
            self.client.sleep()


def _trajectory(output: Any) -> Mapping[str, Any]:
    return output.multimodal_output["trajectory"]


def _rollout(
    outputs: Sequence[Any], jobs: Sequence[Job], conditioning: Mapping[str, Tensor], own: Tensor
) -> Rollout:
    """The engine's outputs, in the order of `jobs`, as one record on the CPU; `own` are their conditioning's rows."""
    trajectories = [_trajectory(output) for output in outputs]

    def stacked(name: str) -> Tensor:
        return torch.stack([trajectory[name] for trajectory in trajectories])

    names = [entry.name for entry in fields(Window) if entry.name in trajectories[0]]
    return Rollout(
        window=Window(**{name: stacked(name) for name in names}),
        log_probs=stacked("log_probs"),
        conditioning={name: rows.cpu() for name, rows in conditioning.items()},
        conditioning_rows=own,
        images=torch.stack([output.images[0] for output in outputs]),
        finite_images=stacked("finite_images"),
        final_latents=stacked("final"),
        group_ids=torch.tensor([job.group for job in jobs]),
        policy_versions=torch.tensor([trajectory["policy_version"] for trajectory in trajectories]),
    ).validate()


def build(
    config: Config, family: ModelFamily, *, merge: Merge, base: nn.Module, probe: probe.ActorProbe | None
) -> VllmOmniEngine:
    """The engine `vllm_omni`, see `build_backend`; it loads a transformer of its own in place of `base`."""
    assert probe is not None, "vllm-omni's engine has to move as the actor does"
    return VllmOmniEngine(family, config, actor_probe=probe, merge=merge)
