"""Requests to scorers that run elsewhere: bounded in time and size, retried, and silent about tokens."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import ipaddress
import json
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import numpy as np

from flowcorr.errors import BackendError, ConfigError, one_sentence
from flowcorr.private import REDACTED, redact_text
from flowcorr.rewards.base import REFUSED_STATUS, causes
from flowcorr.rewards.options import check_positive, check_whole

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WAIT_SECONDS = 30.0
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_EXCERPT_CHARACTERS = 200
_ERROR_BODY_BYTES = 1 << 16
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_PLAIN_TOKEN = re.compile(r"[!-~]+")


class RequestRefusedError(BackendError):
    """A server answered 400, 413 or 422: it refuses this request, but may accept others."""


class _Failure(Exception):
    """A failed attempt; `transient` if another may succeed, after `pause` seconds if the server says so."""

    def __init__(
        self,
        message: str,
        *,
        transient: bool = False,
        pause: float | None = None,
        kind: type[BackendError] = BackendError,
    ) -> None:
        super().__init__(message)
        self.transient, self.pause, self.kind = transient, pause, kind


def _host_only(record: logging.LogRecord) -> bool:
    """Leave the host of the address that httpx2 logs for every request; its path or query may hold a key."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            redact_text(str(arg)) if isinstance(arg, httpx2.URL) else arg for arg in record.args
        )
    return True


logging.getLogger("httpx2").addFilter(_host_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address that answers a POST with JSON.

    Timeouts, lost connections and the statuses 408, 425, 429 and 5xx are tried again, after `backoff`,
    `2 backoff`, `4 backoff`... seconds, or after as long as `Retry-After` asks, never more than 30. The token is
    read from the environment for every request and kept nowhere; if a server echoes it, messages show `***`.
    Redirects are refused, because they would carry the token to another host. Proxies come from the environment.

    Attributes:
        reward: the name of the reward, for messages.
        url: `http://` or `https://`, without a user's name and password.
        token_env: the environment variable that holds a bearer token; None sends none.
        timeout: seconds for a whole attempt, from the look-up of the host's name to the last byte of the answer.
        retries: further attempts after the first.
        backoff: seconds before the second attempt.
        verify: check the server's certificate; a path names a file of certificate authorities.
        max_response_bytes: a longer answer is an error.

    Raises:
        ConfigError: at construction, for options that cannot work, a token that is not set, and a proxy that cannot be
            used.
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
        url = _check_url(self.reward, self.url)
        self._client()
        if self.token_env is not None:
            self._token()
            if url.scheme == "http" and not _is_loopback(url.host):
                text = "reward %s sends the token of %s unencrypted to %s; use https"
                logger.warning(text, self.reward, self.token_env, url.host)

    @property
    def address(self) -> str:
        """The URL for messages: its host, since its path or query may hold a key."""
        return redact_text(self.url)

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
                    raise self.error(f"{failure} (attempt {attempt + 1})", failure.kind) from None
                asked = self.backoff * 2**attempt if failure.pause is None else failure.pause
                seconds = min(asked, MAX_WAIT_SECONDS)
                logger.warning("%s; trying again in %.1f s", self.error(str(failure)), seconds)
            time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def error(self, what: str, kind: type[BackendError] = BackendError) -> BackendError:
        """An error that names the reward and this server's address."""
        return kind(f"reward {self.reward}: {self.address} {what}")

    def excerpt(self, text: str) -> str:
        """The beginning of a server's text in one line, without the token, and without the path that it was sent to."""
        url = httpx2.URL(self.url)
        secrets = {url.path, url.raw_path.decode(), url.query.decode()} - {"", "/"}
        text = redact_text(text, secrets | ({self._token()} if self.token_env is not None else set()))
        shown = "".join(character for character in " ".join(text.split()) if character.isprintable())
        return shown if len(shown) <= _EXCERPT_CHARACTERS else f"{shown[:_EXCERPT_CHARACTERS]}..."

    def _attempt(self, body: bytes, content_type: str) -> bytes:
        """One request; at the deadline it is cancelled, and its connection closed.

        The timeouts of httpx2 begin anew with every byte, and those of a name's look-up are the system's.
        """
        loop = asyncio.new_event_loop()  # `asyncio.run` would wait for the look-up's end
        try:
            return loop.run_until_complete(asyncio.wait_for(self._exchange(body, content_type), self.timeout))
        except (TimeoutError, httpx2.TimeoutException):
            raise _Failure(f"did not answer within timeout={self.timeout:g} s", transient=True) from None
        except httpx2.TransportError as error:
            raise self._no_answer(error) from None
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _exchange(self, body: bytes, content_type: str) -> bytes:
        # An answer that is sent compressed could unpack to any size.
        headers = {"Content-Type": content_type, "Accept": "application/json", "Accept-Encoding": "identity"}
        if self.token_env is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        async with (
            self._client() as client,
            client.stream("POST", self.url, content=body, headers=headers) as response,
        ):
            if not response.is_success:
                raise await self._refusal(response)
            answer = await _read(response, self.max_response_bytes)
        if len(answer) > self.max_response_bytes:
            raise _Failure(f"answered more than max_response_bytes={self.max_response_bytes}")
        return answer

    def _client(self) -> httpx2.AsyncClient:
        """A client for one request, with the proxies that the environment names.

        Raises:
            ConfigError: one of them cannot be used, which is no sample's fault.
        """
        try:
            return httpx2.AsyncClient(verify=_tls(self.verify), timeout=self.timeout)
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"reward {self.reward}: a proxy that the environment names cannot be used ({one_sentence(error)}); "
                "correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or name the reward's host in NO_PROXY"
            ) from None

    def _json(self, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise _Failure(f"answered no JSON: {self.excerpt(answer.decode(errors='replace'))!r}") from None

    async def _refusal(self, response: httpx2.Response) -> _Failure:
        status, hint, body = response.status_code, "", b""
        with suppress(httpx2.TransportError):
            body = await _read(response, _ERROR_BODY_BYTES)
        if response.is_redirect:
            hint = ", a redirect, which is not followed: give the final address"
        elif status in (401, 403):
            hint = f", with the token of {self.token_env}" if self.token_env else ", without a token"
        text = self.excerpt(body.decode(errors="replace"))
        # The other form of Retry-After, a date, is left to the backoff.
        asked = response.headers.get("Retry-After", "")
        return _Failure(
            f"answered status {status}{hint}" + (f": {text}" if text else ""),
            transient=status in _TRANSIENT_STATUS,
            pause=float(asked) if asked.isdecimal() else None,
            kind=RequestRefusedError if status in REFUSED_STATUS else BackendError,
        )

    def _no_answer(self, error: httpx2.TransportError) -> _Failure:
        # The socket's own error is below some wrappers.
        cause = [error, *(inner for inner in causes(error) if isinstance(inner, OSError))][-1]
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _Failure(
                f"has a certificate that cannot be verified ({cause.verify_message}); "
                "set verify to the file of its certificate authority"
            )
        return _Failure(
            f"cannot be reached: {type(cause).__name__}: {self.excerpt(str(cause))}", transient=True
        )

    def _token(self) -> str:
        assert self.token_env is not None
        token = os.environ.get(self.token_env, "").strip()
        if not _PLAIN_TOKEN.fullmatch(token):
            # Some write the token itself in the place of the variable's name.
            name = self.token_env if _VARIABLE.fullmatch(self.token_env) else REDACTED
            raise ConfigError(
                f"reward {self.reward}: the environment variable {name!r} is not set, or holds white space "
                "or characters that no header may carry; it must hold the token itself"
            )
        return token


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> list[Result]:
    """Compute `[function(item) for item in items]` in threads; after an error, no further item is begun.

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


async def _read(response: httpx2.Response, most: int) -> bytes:
    """The body of an answer; of one longer than `most` bytes, little more than its beginning."""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > most:
            break
    return bytes(body)


@functools.cache
def _tls(verify: bool | str) -> ssl.SSLContext:
    if verify is True:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cafile=os.path.expanduser(verify))
    return context


def _check_verify(reward: str, verify: object) -> None:
    try:
        if not isinstance(verify, bool | str):
            raise ValueError("it is not text")
        _tls(verify)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward {reward}: verify={verify!r} must be true, false or a PEM file of certificate authorities "
            f"({error})"
        ) from error


def _check_url(reward: str, text: object) -> httpx2.URL:
    try:
        url = httpx2.URL(str(text))
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"reward {reward}: url must be an http:// or https:// address")
    if url.userinfo:
        raise ConfigError(
            f"reward {reward}: the address of {url.host} holds a user's name or password, which would be "
            "logged; name an environment variable with a token instead"
        )
    return url


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
