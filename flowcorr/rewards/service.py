"""Requests to scorers that run elsewhere: bounded in time and size, retried, and silent about tokens."""

from __future__ import annotations

import base64
import functools
import http.client
import io
import ipaddress
import json
import logging
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import numpy as np

from flowcorr.errors import BackendError, ConfigError
from flowcorr.rewards.options import check_positive, check_whole

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WAIT_SECONDS = 30.0
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# The server is up and takes our token, but not this request: a content filter, an image that is too large.
_REFUSED_STATUS = frozenset({400, 413, 422})
_EXCERPT_CHARACTERS = 200
_ERROR_BODY_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_PLAIN_TOKEN = re.compile(r"[!-~]+")


class RequestRefusedError(BackendError):
    """A server that answered 400, 413 or 422: it will not take this request, and may take others."""


class _Failure(Exception):
    """One attempt that failed; `transient` if another may succeed, after `pause` seconds if the server says.

    `refused` if the server will not take this request, and may take others.
    """

    def __init__(
        self, message: str, *, transient: bool, pause: float | None = None, refused: bool = False
    ) -> None:
        super().__init__(message)
        self.transient = transient
        self.pause = pause
        self.refused = refused


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to whatever host the answer names."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address that answers a POST with JSON.

    Timeouts, lost connections and the statuses 408, 425, 429 and 5xx are tried again, after `backoff`,
    `2 backoff`, `4 backoff`... seconds, or after as long as `Retry-After` asks, never more than 30. The token is
    read from the environment for every request and kept nowhere; should a server echo it, it is struck out of
    messages. Redirects are refused. Proxies come from the environment.

    Attributes:
        reward: the name of the reward, for messages.
        url: `http://` or `https://`, without a user's name and password.
        token_env: the environment variable that holds a bearer token; None sends none.
        timeout: seconds for a connection, and for a whole answer.
        retries: further attempts after the first.
        backoff: seconds before the second attempt.
        verify: check the server's certificate; a path names a file of certificate authorities.
        max_response_bytes: a longer answer is an error.

    Raises:
        ConfigError: at construction, for options that cannot work and a token that is not set.
    """

    reward: str
    url: str
    token_env: str | None
    timeout: float
    retries: int
    backoff: float
    verify: bool | str
    max_response_bytes: int

    def __post_init__(self) -> None:
        check_positive(self.reward, "timeout", self.timeout)
        check_whole(self.reward, "retries", self.retries, 0)
        check_positive(self.reward, "backoff", self.backoff)
        check_whole(self.reward, "max_response_bytes", self.max_response_bytes, 1)
        _check_verify(self.reward, self.verify)
        parts = _check_url(self.reward, self.url)
        if self.token_env is not None:
            self._token()
            if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
                logger.warning(
                    "reward %s sends the token of %s unencrypted to %s; use https",
                    self.reward,
                    self.token_env,
                    parts.hostname,
                )

    @property
    def address(self) -> str:
        """The URL for messages, without its query, which may hold a key."""
        return urlsplit(self.url)._replace(query="", fragment="").geturl()

    def post(self, body: bytes, content_type: str) -> Any:
        """Send `body` and return the answer's JSON.

        Raises:
            RequestRefusedError: status 400, 413 or 422, a `BackendError` of this request alone.
            BackendError: no answer after all attempts, a refusal, or an answer that is too long or no JSON.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._json(self._attempt(body, content_type))
            except _Failure as failure:
                if not failure.transient or attempt == self.retries:
                    kind = RequestRefusedError if failure.refused else BackendError
                    raise self.error(f"{failure} (attempt {attempt + 1})", kind) from None
                asked = self.backoff * 2**attempt if failure.pause is None else failure.pause
                seconds = min(asked, MAX_WAIT_SECONDS)
                logger.warning(
                    "reward %s: %s %s; trying again in %.1f s", self.reward, self.address, failure, seconds
                )
            time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def error(self, what: str, kind: type[BackendError] = BackendError) -> BackendError:
        """`what` this server did, as an error that names it."""
        return kind(f"reward {self.reward}: {self.address} {what}")

    def excerpt(self, text: str) -> str:
        """The beginning of a server's text in one line, without the token."""
        line = " ".join(self._redact(text).split())
        shown = "".join(character for character in line if character.isprintable())
        return shown if len(shown) <= _EXCERPT_CHARACTERS else f"{shown[:_EXCERPT_CHARACTERS]}..."

    def _attempt(self, body: bytes, content_type: str) -> bytes:
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self.token_env is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        deadline = time.monotonic() + self.timeout
        try:
            with _opener(self.verify).open(request, timeout=self.timeout) as response:
                return self._read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self.max_response_bytes:
                raise _Failure(
                    f"answered more than max_response_bytes={self.max_response_bytes}", transient=False
                )
            # The socket's own timeout starts again with every byte that trickles in.
            if time.monotonic() > deadline:
                raise TimeoutError
        if response.length:
            raise _Failure("broke its answer off", transient=True)
        return b"".join(parts)

    def _json(self, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            shown = self.excerpt(answer.decode(errors="replace"))
            raise _Failure(f"answered no JSON: {shown!r}", transient=False) from None

    def _refusal(self, error: urllib.error.HTTPError) -> _Failure:
        body = b""
        with suppress(OSError, http.client.HTTPException):
            body = error.read(_ERROR_BODY_BYTES)
        hint = ""
        if 300 <= error.code < 400:
            hint = ", a redirect, which is not followed: give the final address"
        elif error.code in (401, 403):
            hint = f", with the token of {self.token_env}" if self.token_env else ", without a token"
        text = self.excerpt(body.decode(errors="replace"))
        return _Failure(
            f"answered status {error.code}{hint}" + (f": {text}" if text else ""),
            transient=error.code in _TRANSIENT_STATUS,
            pause=_seconds(error.headers.get("Retry-After")),
            refused=error.code in _REFUSED_STATUS,
        )

    def _no_answer(self, error: OSError | http.client.HTTPException) -> _Failure:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return _Failure(
                f"has a certificate that cannot be verified ({reason.verify_message}); "
                "set verify to the file of its certificate authority",
                transient=False,
            )
        if isinstance(reason, TimeoutError):
            return _Failure(f"did not answer within timeout={self.timeout:g} s", transient=True)
        return _Failure(
            f"cannot be reached: {type(reason).__name__}: {self.excerpt(str(reason))}", transient=True
        )

    def _token(self) -> str:
        assert self.token_env is not None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            raise ConfigError(
                f"reward {self.reward}: the environment variable {self.token_env!r} is not set; "
                "it must hold the token itself"
            )
        if not _PLAIN_TOKEN.fullmatch(token):
            raise ConfigError(
                f"reward {self.reward}: the environment variable {self.token_env!r} holds white space or "
                "characters that no header may carry"
            )
        return token

    def _redact(self, text: str) -> str:
        return text if self.token_env is None else text.replace(self._token(), "***")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> list[Result]:
    """`[function(item) for item in items]` in threads; after an error, what has not begun is not begun.

    Raises:
        Exception: the error of the first item that has one.
    """
    stopping = threading.Event()

    def run(item: Item) -> Result:
        if stopping.is_set():
            raise CancelledError
        try:
            return function(item)
        except BaseException:
            stopping.set()
            raise

    with ThreadPoolExecutor(num_threads) as pool:
        # Items begin in order, so that a real error comes before all that were not begun.
        futures = [pool.submit(run, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            stopping.set()


def png_base64(image: np.ndarray) -> str:
    """An image `[H, W, 3]` uint8 as PNG in base64."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


@functools.cache
def _opener(verify: bool | str) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect)


def _check_url(reward: str, url: object) -> SplitResult:
    try:
        parts = urlsplit(str(url))
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018  (raises for a port that is no number)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"reward {reward}: url={url!r} must be an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"reward {reward}: the address of {parts.hostname} holds a user's name or password, which would be "
            "logged; name an environment variable with a token instead"
        )
    return parts


def _check_verify(reward: str, verify: object) -> None:
    if isinstance(verify, bool):
        return
    problem: object = "it is no text"
    if isinstance(verify, str):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=verify)
            return
        except (OSError, ValueError) as error:
            problem = error
    raise ConfigError(
        f"reward {reward}: verify={verify!r} must be true, false or a PEM file of certificate authorities ({problem})"
    )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds; its other form, a date, is left to the backoff."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
