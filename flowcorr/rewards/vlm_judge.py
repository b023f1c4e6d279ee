"""A vision-language model as the judge, behind an OpenAI-compatible chat endpoint (vLLM, SGLang, hosted models)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from flowcorr.errors import BackendError, ConfigError, MissingExtraError
from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.ocr import compare
from flowcorr.rewards.options import check_choice, check_text, check_whole, is_number
from flowcorr.rewards.references import references_of
from flowcorr.rewards.service import Endpoint, RequestRefusedError, map_in_threads, png_base64
from flowcorr.rewards.targets import targets_of

Value = TypeVar("Value")
_Object: TypeAlias = tuple[int, int, dict[str, Any]]  # of JSON in a text: its begin, its end, its value

TEMPLATES = {
    "transcribe": (
        "Write down all text that can be read in this image, exactly as it is spelt there, mistakes included. "
        'Answer with JSON only: {"text": "..."}. If there is none, answer {"text": ""}.'
    ),
    "score": (
        "This image was made for the following request.\n\n{prompt}\n\nRate from {low} to {high} how well it shows "
        "what was asked for and how free of flaws it is. "
        'Answer with JSON only: {"score": <number>}.'
    ),
    "score an edit": (
        "The last image was made from the others by the following request.\n\n{prompt}\n\nRate from {low} to {high} "
        "how well it does what was asked for, keeps the rest as it was, and is free of flaws. "
        'Answer with JSON only: {"score": <number>}.'
    ),
}
_OPENING = re.compile(r'\{(?=\s*["}])')  # of a JSON object
# Of the thoughts of models that leave them in their answers.
_THOUGHTS = re.compile(
    r"(?i)(?:<(?P<end>/)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis)>|\[(?P<square>/)?think\]|◁(?P<kimi>/)?think▷)"
)
_FINISHED = ("stop", "stop_sequence", "eos", "eos_token", "end_turn")  # an answer that a model ended itself
_READ_CHARACTERS = 1 << 16  # of an answer, its last ones; far more than `max_tokens` allow
_PLACEHOLDER = re.compile(r"\{(prompt|target|low|high)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmJudge:
    """A vision-language model's score of an image, in 0..1.

    `transcribe` lets it read the text in the image and scores the edit similarity with the prompt's target, as the
    reward `ocr` does; logs `exact_match`. `score` lets it give a number within `score_range`, mapped onto 0..1.
    Each image is a request of its own, at temperature 0, so that no score depends on the batch. The last JSON object
    with the key counts, outside the model's thoughts (`<think>...</think>`), so that a model may reason first. An image
    fails alone if its answer has no such object, or is cut off by `max_tokens` or within thoughts, or if the status is
    400, 413 or 422, as of a content filter. It is not asked again: at temperature 0 the answer would be the same. In
    mode `score`, a prompt's reference images are sent before the image, at its size.

    Attributes:
        base_url: the address without `/chat/completions`, such as `http://localhost:8000/v1`.
        model: the name that the endpoint knows the model by.
        mode: `transcribe` or `score`.
        template: the question, with the fields `{prompt}`, `{target}`, `{low}`, `{high}`; null takes `TEMPLATES[mode]`,
            or the one for edits if the prompt has reference images. It must ask for `{"text": "..."}` or
            `{"score": number}`.
        score_range: lowest and highest score; an answer outside fails its image.
        max_tokens: of an answer, its thoughts included.
        concurrency: requests at a time.
        api_key_env: the environment variable that holds the key; null sends none.
        timeout: seconds for a whole attempt, from the connection to the last byte.
        retries: further attempts after a timeout, a lost connection or a status 429 or 5xx.
        backoff: seconds before the second attempt; doubled for each further one.
        verify: check the server's certificate; a path names a file of certificate authorities.

    Raises:
        ConfigError: at construction, for options that cannot work and a key that is not set.
        MissingExtraError: at construction, if `transcribe` lacks a package.
    """

    base_url: str
    model: str
    mode: Literal["transcribe", "score"] = "score"
    template: str | None = None
    score_range: tuple[float, float] = (0, 10)
    max_tokens: int = 512
    concurrency: int = 8
    api_key_env: str | None = None
    timeout: float = 120.0
    retries: int = 4
    backoff: float = 1.0
    verify: bool | str = True
    endpoint: Endpoint = field(init=False, repr=False, compare=False)

    name = "vlm_judge"
    extras = ("exact_match",)  # of mode `transcribe`
    overlaps = True

    def __post_init__(self) -> None:
        check_text(self.name, "model", self.model)
        if self.api_key_env is not None:
            check_text(self.name, "api_key_env", self.api_key_env)
        check_choice(self.name, "mode", self.mode, ["transcribe", "score"])
        check_whole(self.name, "max_tokens", self.max_tokens, 1)
        check_whole(self.name, "concurrency", self.concurrency, 1)
        _check_score_range(self.score_range)
        _check_template(self)
        if self.mode == "transcribe":
            _import_rapidfuzz()
        endpoint = Endpoint(
            reward=self.name,
            url=f"{str(self.base_url).rstrip('/')}/chat/completions",
            token_env=self.api_key_env,
            timeout=self.timeout,
            retries=self.retries,
            backoff=self.backoff,
            verify=self.verify,
            max_response_bytes=1 << 20,
        )
        object.__setattr__(self, "endpoint", endpoint)

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8.

        Raises:
            BatchError: `transcribe`, or a template with `{target}`, and a prompt without a target.
            BackendError: the endpoint cannot be reached, refuses otherwise, or answers no chat completion.
        """
        if self.needs_target({"mode": self.mode, "template": self.template}):
            targets_of(prompts, self.name)
        references: list[list[np.ndarray]] = [[] for _ in prompts]
        if self.mode == "score":
            references = references_of(prompts, *images.shape[1:3])
        requests = zip(images, prompts, references, strict=True)
        answers = map_in_threads(self._ask, requests, self.concurrency)
        if self.mode == "transcribe":
            return self._compare(answers, prompts)
        low, high = self.score_range
        scores, errors = self._read(answers, self._score_of)
        return RewardOutput(
            scores=np.array([np.nan if score is None else (score - low) / (high - low) for score in scores]),
            errors=errors,
        )

    @staticmethod
    def needs_target(options: Mapping[str, Any]) -> bool:
        """Whether every prompt must have a target: for `transcribe`, and for a template with `{target}`."""
        return options.get("mode") == "transcribe" or "{target}" in str(options.get("template"))

    def _compare(self, answers: list[str | BackendError], prompts: list[Prompt]) -> RewardOutput:
        texts, errors = self._read(answers, lambda answer: last_value(answer, "text", str))
        exact, similarity = compare([text or "" for text in texts], targets_of(prompts, self.name))
        unread = np.array([text is None for text in texts], dtype=bool)
        return RewardOutput(
            scores=np.where(unread, np.nan, similarity),
            extra={"exact_match": np.where(unread, np.nan, exact)},
            errors=errors,
        )

    def _read(
        self, answers: list[str | BackendError], parse: Callable[[str], Value]
    ) -> tuple[list[Value | None], dict[int, str]]:
        """Parse each answer: its value, or None and an error by index."""
        values: list[Value | None] = []
        errors: dict[int, str] = {}
        for index, answer in enumerate(answers):
            if isinstance(answer, BackendError):
                values.append(None)
                errors[index] = str(answer)
                continue
            try:
                values.append(parse(answer))
            except ValueError as error:
                values.append(None)
                errors[index] = f"{self.model} answered {self.endpoint.excerpt(answer)!r}, {error}"
        return values, errors

    def _score_of(self, answer: str) -> float:
        low, high = self.score_range
        score = last_value(answer, "score", (int, float))
        if not low <= score <= high:
            raise ValueError(f"whose score is not within score_range=[{low:g}, {high:g}]")
        return score

    def _ask(self, asked: tuple[np.ndarray, Prompt, list[np.ndarray]]) -> str | BackendError:
        """The answer, or why there is none, which is no reason not to ask about the other images."""
        image, prompt, references = asked
        pictures = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_base64(pixels)}"}}
            for pixels in (*references, image)
        ]
        question = {"type": "text", "text": self._question(prompt)}
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*pictures, question]}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        try:
            completion = self.endpoint.post(json.dumps(request).encode(), "application/json")
        except RequestRefusedError as error:
            return error
        return self._content(completion)

    def _question(self, prompt: Prompt) -> str:
        low, high = self.score_range
        values = {
            "prompt": prompt.text,
            "target": prompt.target or "",
            "low": f"{low:g}",
            "high": f"{high:g}",
        }
        edits = self.mode == "score" and prompt.images
        template = self.template or TEMPLATES["score an edit" if edits else self.mode]
        return _PLACEHOLDER.sub(lambda match: values[match[1]], template)

    def _content(self, completion: Any) -> str | BackendError:
        try:
            choice = completion["choices"][0]
            text = _text_of(choice["message"]["content"])
            finish = choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            shown = self.endpoint.excerpt(json.dumps(completion))
            raise self.endpoint.error(f"answered no chat completion: {shown}") from None
        if finish is None or str(finish).lower() in _FINISHED:
            return text
        remedy = f"; raise max_tokens={self.max_tokens}" if "length" in str(finish).lower() else ""
        return BackendError(
            f"{self.model} answered {self.endpoint.excerpt(text)!r}, which was cut off (finish_reason={finish!r})"
            f"{remedy}"
        )


def last_value(answer: str, key: str, kind: type | tuple[type, ...]) -> Any:
    """The value of `key` in the last JSON object of a text that has it and does not lie in a model's thoughts.

    Raises:
        ValueError: there is none, it is not of this kind, or the text ends in thoughts; the message continues "the
            model answered ...,".
    """
    objects = _objects(answer)
    mark = _last_mark(answer, objects)
    if mark is not None and not any(mark.groups()):
        raise ValueError(f"which ends in the thoughts that {mark[0]} begins; raise max_tokens")
    answered = 0 if mark is None else mark.end()
    values = [value for begin, _, value in objects if begin >= answered and key in value]
    if not values:
        raise ValueError(f'which holds no JSON object with the key "{key}"')
    value = values[-1][key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'whose "{key}" is {type(value).__name__}')
    return value


def _text_of(content: Any) -> str:
    """The text of a message's content, a string or a list of parts; a refusal, or nothing but thoughts, has none."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _last_mark(text: str, objects: Sequence[_Object]) -> re.Match[str] | None:
    """The last mark of a text that begins or ends thoughts; one in a JSON object is of a picture that shows it."""
    end = len(text)
    for begin, after, _ in (*reversed(objects), (0, 0, {})):
        for mark in reversed(list(_THOUGHTS.finditer(text, after, end))):
            return mark
        end = begin
    return None


def _objects(text: str) -> list[_Object]:
    """The JSON objects at the end of a text, outermost only, in order.

    The search goes on where a broken one breaks off, so nothing is parsed twice, and no text takes long.
    """
    # Not strict: a model that transcribes several lines may write their breaks as they are.
    decoder, objects, rest = json.JSONDecoder(strict=False), [], text[-_READ_CHARACTERS:]
    while opening := _OPENING.search(rest):
        rest = rest[opening.start() :]
        begin = len(text) - len(rest)
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            end = max(
                getattr(error, "pos", len(rest)), 1
            )  # without a position it is too deep or too large a number
        else:
            objects.append((begin, begin + end, value))
        rest = rest[end:]
    return objects


def _check_score_range(score_range: Any) -> None:
    good = (
        isinstance(score_range, (list, tuple)) and len(score_range) == 2 and all(map(is_number, score_range))
    )
    if not good or not score_range[0] < score_range[1]:
        raise ConfigError(
            f"reward vlm_judge: score_range={score_range!r} must be the lowest and the highest score, such as [0, 10]"
        )


def _check_template(options: VlmJudge) -> None:
    if options.template is None:
        return
    if not isinstance(options.template, str) or not options.template.strip():
        raise ConfigError(
            f"reward vlm_judge: template={options.template!r} must be text, or null for the mode's own"
        )
    if options.mode == "transcribe" and "{target}" in options.template:
        raise ConfigError(
            "reward vlm_judge: the template holds {target}, the words that the model should read; leave it out"
        )


def _import_rapidfuzz() -> None:
    try:
        import rapidfuzz  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("reward vlm_judge with mode transcribe", "rapidfuzz", "ocr", error) from error
