"""Runs a pipeline's own call, and records the inputs of its transformer, scheduler and VAE."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Rows = list["Row"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sample of a forward pass: the transformer's inputs by the names of its parameters, and its output."""

    inputs: Mapping[str, Any]
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A step of the pipeline.

    Attributes:
        latents: `[1, ...]` before it, in the pipeline's layout.
        velocity: like `latents`, under guidance, as the scheduler got it.
        rows: those of its forward passes.
    """

    latents: Tensor
    velocity: Tensor
    rows: Rows


@dataclass(slots=True, kw_only=True, eq=False)
class PipelineCall:
    """The pipeline's own call for one prompt.

    Attributes:
        steps: those that were computed, by their place in the schedule.
        sigmas: the scheduler's table.
        final: latents after the last step, in the pipeline's layout.
        decoded: the VAE's input; None if nothing was decoded.
        pixels: `[1, H, W, 3]` or `[1, F, H, W, 3]`, 0 to 1; None likewise.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    sigmas: tuple[float, ...] = ()
    final: Tensor | None = None
    decoded: Tensor | None = None
    pixels: Tensor | None = None


def call_pipeline(
    pipeline: Any, arguments: Mapping[str, Any], steps: Sequence[int], *, decodes: bool
) -> PipelineCall:
    """Call a pipeline with forward passes at a few steps only; other steps repeat the last outputs.

    Args:
        pipeline: of diffusers, with a batch of one prompt.
        arguments: of its call; those that it does not have are left out.
        steps: places of the computed steps in the schedule, the first one among them.
        decodes: whether the final latents are decoded.
    """
    call, transformer, scheduler = PipelineCall(), pipeline.transformer, pipeline.scheduler
    forward, step = transformer.forward, scheduler.step
    rows: Rows = []
    outputs: list[Any] = []
    place = passes = 0

    def computed(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        if place in steps:
            output = forward(*args, **kwargs)
            rows.extend(rows_of(transformer, output, *args, **kwargs))
            del outputs[passes:]
            outputs.append(output)
        passes += 1
        return outputs[min(passes, len(outputs)) - 1]

    def stepped(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal place, passes
        if place in steps:
            call.steps[place] = Step(latents=sample.clone(), velocity=model_output.clone(), rows=[*rows])
        rows.clear()
        place, passes = place + 1, 0
        result = step(model_output, timestep, sample, *args, **kwargs)
        call.final = result[0] if isinstance(result, tuple) else result.prev_sample
        return result

    options = {"output_type": "np" if decodes else "latent", **arguments}
    accepted = inspect.signature(pipeline.__call__).parameters
    with (
        replaced(transformer, "forward", computed),
        replaced(scheduler, "step", stepped),
        decoder_inputs(pipeline.vae) as decoded,
        torch.no_grad(),
    ):
        result = pipeline(**{name: value for name, value in options.items() if name in accepted})
    call.sigmas = tuple(scheduler.sigmas.tolist())
    if decodes:
        shown = result.frames if hasattr(result, "frames") else result.images
        call.pixels, call.decoded = torch.as_tensor(shown), decoded[-1]
    return call


def recorded(transformer: Any, rows: Rows) -> Callable[..., Any]:
    """A function that calls `transformer`, and appends the rows of each pass to `rows`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = transformer(*args, **kwargs)
        rows.extend(rows_of(transformer, output, *args, **kwargs))
        return output

    return call


def rows_of(transformer: Any, output: Any, *args: Any, **kwargs: Any) -> Rows:
    """The samples of one forward pass."""
    bound = inspect.signature(type(transformer).forward).bind(transformer, *args, **kwargs)
    inputs = {name: value for name, value in list(bound.arguments.items())[1:] if value is not None}
    predicted = output[0] if isinstance(output, tuple) else output.sample
    count = len(predicted)
    return [
        Row(
            inputs={name: _of_row(value, row, count) for name, value in inputs.items()}, output=predicted[row]
        )
        for row in range(count)
    ]


def _of_row(value: Any, row: int, count: int) -> Any:
    if isinstance(value, Tensor):
        value = (
            value.detach().clone() if value.dim() == 0 or len(value) != count else value[row].detach().clone()
        )
        return value.cpu()
    if isinstance(value, list) and len(value) == count:
        return _of_row(value[row], 0, 0) if isinstance(value[row], Tensor) else value[row]
    return value


@contextlib.contextmanager
def decoder_inputs(vae: Any) -> Iterator[list[Tensor]]:
    """The latents that a VAE decodes in this context."""
    inputs: list[Tensor] = []
    decode = vae.decode

    def kept(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs.append(latents.detach().clone())
        return decode(latents, *args, **kwargs)

    with replaced(vae, "decode", kept):
        yield inputs


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute `name` of an object is `value`."""
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
