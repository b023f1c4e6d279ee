"""A scorer of one's own behind HTTP, for rewards that need another environment or another machine.

A batch is sent in requests of at most `batch_size` images. With `format: json` the body is

    {"images": ["<PNG in base64>", ...], "prompts": ["...", ...], "targets": ["..." or null, ...],
     "metadata": [{...}, ...]}

and with `format: npz` an archive of NumPy (`Content-Type: application/x-npz`), to be read with
`numpy.load(io.BytesIO(body), allow_pickle=False)`, that holds `images`, `[b, H, W, 3]` uint8, and `request`, a text
with the JSON above without its images. It is larger, and costs neither side a codec.

Where prompts have reference images, there is also `references`: for each image a list of its prompt's, scaled and cut
to its size as the model got them, in JSON as `[["<PNG in base64>", ...], ...]`, in an archive `[b, R, H, W, 3]` uint8.

The answer is JSON in both cases, with status 200:

    {"scores": [0.5, null, ...], "extra": {"name": [1.0, 0.0, ...], ...}}

one number for each image, in order. `extra` may be left out; its numbers are only logged. null means that this one
image cannot be scored; any other status than 200 fails the whole batch. A token travels as
`Authorization: Bearer <token>`. Nothing is pickled in either direction.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.options import check_choice, check_text, check_whole
from flowcorr.rewards.references import references_of
from flowcorr.rewards.service import Endpoint, map_in_threads, png_base64

_EXTRA_NAME = re.compile(r"[\w./-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReward:
    """The scores that a server gives; this module's text has the format.

    Attributes:
        url: its address.
        format: `json` sends PNG in base64, `npz` raw pixels.
        batch_size: images a request.
        concurrency: requests at a time.
        token_env: the environment variable that holds a bearer token; null sends none.
        timeout: seconds for a whole attempt, from the connection to the last byte.
        retries: further attempts after a timeout, a lost connection or a status 429 or 5xx.
        backoff: seconds before the second attempt; doubled for each further one.
        verify: check the server's certificate; a path names a file of certificate authorities.
        max_response_bytes: a longer answer is an error.

    Raises:
        ConfigError: at construction, for options that cannot work and a token that is not set.
    """

    url: str
    format: Literal["json", "npz"] = "json"
    batch_size: int = 32
    concurrency: int = 1
    token_env: str | None = None
    timeout: float = 60.0
    retries: int = 3
    backoff: float = 1.0
    verify: bool | str = True
    max_response_bytes: int = 1 << 20
    endpoint: Endpoint = field(init=False, repr=False, compare=False)

    name = "http"
    overlaps = True
    sends_targets = True

    def __post_init__(self) -> None:
        if self.token_env is not None:
            check_text(self.name, "token_env", self.token_env)
        check_choice(self.name, "format", self.format, list(_ENCODERS))
        check_whole(self.name, "batch_size", self.batch_size, 1)
        check_whole(self.name, "concurrency", self.concurrency, 1)
        endpoint = Endpoint(
            reward=self.name,
            url=self.url,
            token_env=self.token_env,
            timeout=self.timeout,
            retries=self.retries,
            backoff=self.backoff,
            verify=self.verify,
            max_response_bytes=self.max_response_bytes,
        )
        object.__setattr__(self, "endpoint", endpoint)

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8.

        Raises:
            BackendError: the server cannot be reached, refuses, or answers in another format.
        """
        begins = range(0, len(prompts), self.batch_size)
        batches = [slice(begin, begin + self.batch_size) for begin in begins]
        outputs = map_in_threads(
            lambda batch: self._score(images[batch], prompts[batch]), batches, self.concurrency
        )
        names = list(outputs[0].extra) if outputs else []
        for output in outputs:
            if set(output.extra) != set(names):
                raise self.endpoint.error(
                    f"answered the names {names} in extra for one part of a batch, and {list(output.extra)} for another"
                )
        return RewardOutput.concatenate([RewardOutput(scores=np.empty(0)), *outputs])

    def _score(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        body, content_type = _ENCODERS[self.format](images, prompts)
        answer = self.endpoint.post(body, content_type)
        try:
            return read_answer(answer, len(prompts))
        except ValueError as error:
            raise self.endpoint.error(f"answered {error}") from None


def encode_json(images: np.ndarray, prompts: list[Prompt]) -> tuple[bytes, str]:
    """The body of a request in the format `json`, and its content type."""
    request = {"images": [png_base64(image) for image in images], **_described(prompts)}
    if references := _references(images, prompts):
        request["references"] = [[png_base64(image) for image in own] for own in references]
    return json.dumps(request).encode(), "application/json"


def encode_npz(images: np.ndarray, prompts: list[Prompt]) -> tuple[bytes, str]:
    """The body of a request in the format `npz`, and its content type."""
    buffer = io.BytesIO()
    references = _references(images, prompts)
    given: dict[str, Any] = {"references": np.array(references)} if references else {}
    np.savez(buffer, images=images, request=np.array(json.dumps(_described(prompts))), **given)
    return buffer.getvalue(), "application/x-npz"


_ENCODERS = {"json": encode_json, "npz": encode_npz}


def read_answer(answer: Any, batch_size: int) -> RewardOutput:
    """Scores `[B]` and extras from a server's JSON.

    Raises:
        ValueError: it has another form; the message continues "the server answered".
    """
    if not isinstance(answer, dict) or "scores" not in answer:
        raise ValueError('no object with "scores", such as {"scores": [0.5, 1.0]}')
    extra = answer.get("extra") or {}
    if not isinstance(extra, dict):
        raise ValueError('an "extra" that is not an object')
    for name in extra:
        if not _EXTRA_NAME.fullmatch(name):
            raise ValueError(
                f"the name {name[:80]!r} in extra; use up to 64 letters, digits and any of ._-/ in a name"
            )
    return RewardOutput(
        scores=_numbers(answer["scores"], batch_size, "scores"),
        extra={name: _numbers(values, batch_size, f"extra.{name}") for name, values in extra.items()},
    )


def _described(prompts: list[Prompt]) -> dict[str, list[Any]]:
    return {
        "prompts": [prompt.text for prompt in prompts],
        "targets": [prompt.target for prompt in prompts],
        "metadata": [dict(prompt.metadata) for prompt in prompts],
    }


def _references(images: np.ndarray, prompts: list[Prompt]) -> list[list[np.ndarray]]:
    """The reference images of each prompt; none at all if no prompt has one."""
    has_some = any(prompt.images for prompt in prompts)
    return references_of(prompts, *images.shape[1:3]) if has_some else []


def _numbers(values: Any, batch_size: int, what: str) -> np.ndarray:
    if not isinstance(values, list):
        raise ValueError(f'a "{what}" that is not a list')
    if len(values) != batch_size:
        raise ValueError(f'{len(values)} numbers in "{what}" for {batch_size} images')
    for place, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f'a {type(value).__name__} in "{what}" at place {place}; use a number or null')
    try:
        return np.array([np.nan if value is None else float(value) for value in values])
    except OverflowError:
        raise ValueError(f'a number in "{what}" that is too large') from None
