"""Reference images as an engine may have prepared or placed them instead."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowcorr.instruments.doctor.mistakes import FLIPS, configured, scalings
from flowcorr.instruments.doctor.trials import REFERENCES, Trial
from flowcorr.models.packed import PackedFamily
from flowcorr.records import Prompt
from flowcorr.sde.transition import over_elements

_TRY = 0.05  # first change of the references' scale, and of their shift
_ROUNDS = 5  # of Gauss and Newton for scale and shift


def _flipped(fitted: Image.Image, original: Image.Image, axis: int) -> Image.Image:
    return Image.fromarray(np.flip(np.asarray(fitted), axis))


_PIXELS: Mapping[str, Callable[[Image.Image, Image.Image], Image.Image]] = {
    **{words: partial(_flipped, axis=axis) for words, axis in FLIPS.items()},
    "squeezed, and not cut, to their size": lambda fitted, original: original.resize(fitted.size),
}


def prepared(family: PackedFamily, prompts: Sequence[Prompt], references: Tensor) -> dict[str, Tensor]:
    """Reference images `[P, R, ...]` of pixels that were prepared otherwise, by the mistake in words.

    Args:
        family: the actor's.
        prompts: the prompts with their images; where they are not known, decoded latents stand for the images.
        references: the latents of their images.
    """
    if prompts:
        others = {name: _encoded(family, prompts, change, references) for name, change in _PIXELS.items()}
        return others | _unscaled(family, prompts, references)
    with torch.no_grad():
        pixels = family.decode(references.flatten(0, 1)).clamp(-1, 1).to(family.pipeline.vae.dtype)
        flipped = {
            words: family.encode_image(pixels.movedim(1, -1).flip(axis).movedim(-1, 1))
            for words, axis in FLIPS.items()
        }
    return {name: rows.to(references).view_as(references) for name, rows in flipped.items()}


def _encoded(
    family: PackedFamily,
    prompts: Sequence[Prompt],
    change: Callable[[Image.Image, Image.Image], Image.Image],
    references: Tensor,
) -> Tensor:
    """The references of images that went through `change(fitted, original)`."""
    other = copy.copy(family)
    other.fitted_references = lambda prompt: [  # type: ignore[method-assign]
        change(fitted, image.image())
        for fitted, image in zip(family.fitted_references(prompt), prompt.images, strict=True)
    ]
    return other.encode_references(prompts)[REFERENCES].to(references)


def _unscaled(family: PackedFamily, prompts: Sequence[Prompt], references: Tensor) -> dict[str, Tensor]:
    """The references without the VAE's scaling, where its configuration has numbers for it."""
    for _, changes in itertools.islice(scalings(family), 1):  # without any of its numbers
        with configured(family, changes):
            return {"without the VAE's scaling": family.encode_references(prompts)[REFERENCES].to(references)}
    return {}


def affine(trial: Trial, references: Tensor, means_under: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The scale and the shift of the references with which the steps agree best, by Gauss and Newton.

    Args:
        trial: the engine's steps.
        references: of the actor.
        means_under: the actor's step means `[B, T, *L]` under other references.
    """
    stds = over_elements(trial.stds.double(), trial.engine_means)

    def means(scale: float, shift: float) -> Tensor:
        return (means_under(scale * references + shift).double() / stds).flatten()

    engine = (trial.engine_means.double() / stds).flatten()
    best, at = (1.0, 0.0), torch.tensor([1.0, 0.0], dtype=torch.float64)
    least = float((engine - means(*best)).square().sum())
    for _ in range(_ROUNDS):
        here = means(*at.tolist())
        moves = torch.eye(2, dtype=torch.float64) * _TRY
        slopes = torch.stack([means(*(at + move).tolist()) - here for move in moves], 1) / _TRY
        step = torch.linalg.lstsq(slopes.cpu(), (engine - here).cpu()[:, None]).solution[:, 0]
        at = at + step.clamp(-1, 1)
        rest = float((engine - means(*at.tolist())).square().sum())
        if rest >= least:
            break
        best, least = (float(at[0]), float(at[1])), rest
    return best


# Places of references ----------------------------------------------------------------------------------------

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Other places of the reference images' tokens.

    Attributes:
        ids: changes their rows `[tokens, 3 or 4]` of `img_ids`: number of the image, row, column.
        grid: changes the number of an image and its grid, in transformers that take `img_shapes`; null: not tried.
    """

    ids: Callable[[Tensor], Tensor]
    grid: Callable[[int, Grid], tuple[int, Grid]] | None = None


def _numbered(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Places with other numbers of their images, the first axis."""
    return lambda ids: torch.cat([change(ids[:, :1]), ids[:, 1:]], 1)


_PLACES: Mapping[str, _Place] = {
    "at the places of the image that is drawn": _Place(
        ids=_numbered(torch.zeros_like), grid=lambda number, grid: (0, grid)
    ),
    "all at the places of the first": _Place(
        ids=_numbered(lambda numbers: numbers[:1].expand_as(numbers)), grid=lambda number, grid: (1, grid)
    ),
    "at places that count images by ones": _Place(ids=_numbered(lambda numbers: numbers / numbers[:1])),
    "at places that count images by tens": _Place(ids=_numbered(lambda numbers: 10 * numbers / numbers[:1])),
    "at places of exchanged rows and columns": _Place(
        ids=lambda ids: torch.cat([ids[:, :1], ids[:, [2, 1]], ids[:, 3:]], 1),
        grid=lambda number, grid: (number, (grid[0], grid[2], grid[1])),
    ),
    "at places that are one too late": _Place(ids=lambda ids: ids.roll(1, 0)),
}


@contextlib.contextmanager
def placed(transformer: nn.Module, place: _Place, drawn: int) -> Iterator[None]:
    """The transformer gets other places of the tokens behind the `drawn` first ones meanwhile."""

    def with_ids(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = inputs["img_ids"]
        return args, {**inputs, "img_ids": torch.cat([ids[:drawn], place.ids(ids[drawn:])])}

    def with_grids(module: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> Any:
        own, *grids = args[0][0]
        assert place.grid is not None, "`places` leaves such out"
        parts = [output[0][:drawn]]
        for number, grid in itertools.starmap(place.grid, enumerate(grids, 1)):
            shapes = [[own] * number + [grid]]
            tokens = grid[1] * grid[2]
            parts.append(type(module).forward(module, shapes, **inputs)[0][-tokens:])
        return torch.cat(parts), *output[1:]

    if "img_ids" in inspect.signature(transformer.forward).parameters:
        hook = transformer.register_forward_pre_hook(with_ids, with_kwargs=True)
    else:
        rotary = cast(nn.Module, transformer.pos_embed)
        hook = rotary.register_forward_hook(with_grids, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def places(transformer: nn.Module) -> dict[str, _Place]:
    """The rows of `_PLACES` that a transformer can show."""
    accepted = inspect.signature(transformer.forward).parameters
    if "img_ids" in accepted:
        return dict(_PLACES)
    if "img_shapes" in accepted:
        return {name: place for name, place in _PLACES.items() if place.grid is not None}
    return {}
