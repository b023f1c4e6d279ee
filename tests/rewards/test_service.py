import base64
import contextlib
import gzip
import io
import logging
import shutil
import socket
import ssl
import subprocess
import threading

import numpy as np
import pytest
from PIL import Image

from flowcorr.errors import BackendError, ConfigError
from flowcorr.rewards.service import Endpoint, map_in_threads, png_base64

TOKEN = "s3cret-t0ken/+="
OPTIONS = {
    "reward": "http",
    "token_env": None,
    "timeout": 300.0,
    "retries": 2,
    "backoff": 0.001,
    "verify": True,
    "max_response_bytes": 1000,
}


def endpoint(server_or_url, **options):
    url = getattr(server_or_url, "url", server_or_url)
    return Endpoint(**{**OPTIONS, "url": url, **options})


def post(point):
    return point.post(b"{}", "application/json")


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)
    return "SCORER_TOKEN"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that no authority has signed, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=scorer", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def secure(serve, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return serve(lambda request: [1], ssl_context=context)


def test_body_and_headers_arrive(serve, token):
    server = serve(lambda request: {"length": len(request.body)})
    point = endpoint(f"{server.url}/score?model=a", token_env=token)
    assert point.post(b"12345", "text/plain") == {"length": 5}
    (request,) = server.requests
    assert request.path == "/score?model=a"
    assert request.headers["Authorization"] == f"Bearer {TOKEN}"
    assert request.headers["Content-Type"] == "text/plain"


def test_no_token_is_sent_unless_asked(serve, token):
    server = serve(lambda request: [])
    post(endpoint(server))
    assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_statuses_are_tried_again(serve, status, caplog):
    replies = [(status, {"no": 1}, {}), (status, {"no": 2}, {}), (200, {"yes": 3}, {})]
    server = serve(lambda request: replies[len(server.requests) - 1])
    assert post(endpoint(server)) == {"yes": 3}
    assert len(server.requests) == 3
    assert f"answered status {status}" in caplog.text
    assert "trying again" in caplog.text


def test_waits_double_and_retry_after_counts(serve, monkeypatch):
    waits = []
    monkeypatch.setattr("flowcorr.rewards.service.time.sleep", waits.append)
    server = serve(lambda request: (503, b"", {}))
    with pytest.raises(BackendError):
        post(endpoint(server, backoff=2, retries=5))
    assert waits == [2, 4, 8, 16, 30]
    waits.clear()
    server = serve(lambda request: (429, b"", {"Retry-After": "7"}))
    with pytest.raises(BackendError):
        post(endpoint(server, retries=2))
    assert waits == [7, 7]


def test_error_after_all_attempts_names_reward_address_status_and_text(serve):
    server = serve(lambda request: (500, b"out of\n  memory\x00", {}))
    with pytest.raises(BackendError) as caught:
        post(endpoint(f"{server.url}/score?key=hidden"))
    said = str(caught.value)
    assert said.startswith(f"reward http: {server.url}/*** ")
    for part in ("500", ": out of memory", "3)"):  # status, text, attempt
        assert part in said
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_refusals_are_not_tried_again(serve, status):
    server = serve(lambda request: (status, b"no", {}))
    with pytest.raises(BackendError, match=rf"status {status}.*: no \(attempt 1\)"):
        post(endpoint(server))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("variable", "named"), [("SCORER_TOKEN", "token of SCORER_TOKEN"), (None, "without a token")]
)
def test_refused_token_is_named_by_its_variable(serve, token, variable, named):
    server = serve(lambda request: (401, b"", {}))
    with pytest.raises(BackendError, match=f"status 401.* {named}"):
        post(endpoint(server, token_env=variable))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_refused_and_carry_no_token(serve, token, status):
    other = serve(lambda request: [1])
    server = serve(lambda request: (status, b"", {"Location": other.url}))
    with pytest.raises(BackendError, match=f"status {status}, a redirect"):
        post(endpoint(server, token_env=token))
    assert other.requests == []


def test_slow_server_ends_in_a_timeout(serve):
    server = serve(lambda request: server.stopping.wait(600) or [])
    with pytest.raises(BackendError, match=r"timeout=0\.1 s \(attempt 2\)"):
        post(endpoint(server, timeout=0.1, retries=1))


TRICKLES = {
    "headers": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"y"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "error": (b"HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\n", b"n"),
}


@contextlib.contextmanager
def trickling(begin, drop):
    """The address of a server that sends `begin` and then `drop` again and again; an event once its client is gone."""
    stopping, left = threading.Event(), threading.Event()

    def trickle(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begin)
            while not stopping.wait(0.02):
                connection.sendall(drop)
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        watchdog = threading.Timer(60, stopping.set)
        watchdog.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", left
            assert not stopping.is_set(), "the request took as long as the server liked"
        finally:
            watchdog.cancel()
            stopping.set()
            thread.join()


@pytest.mark.parametrize("part", TRICKLES)
def test_an_answer_that_trickles_ends_in_a_timeout_and_leaves_nothing_behind(part, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with trickling(*TRICKLES[part]) as (url, left):
        with pytest.raises(BackendError, match=r"timeout=0\.2 s"):
            post(endpoint(url, timeout=0.2, retries=0))
        assert left.wait(60), "the connection stayed open"


def test_a_name_that_is_looked_up_for_ever_ends_in_a_timeout(monkeypatch):
    asked, found = threading.Event(), threading.Event()

    def look_up(*arguments, **options):
        asked.set()
        found.wait(60)
        raise socket.gaierror("no such name")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(BackendError, match=r"timeout=0\.2 s"):
        post(endpoint("http://scorer.example", timeout=0.2, retries=0))
    assert asked.is_set()
    found.set()


def test_nobody_listens(serve):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BackendError, match=rf"{port} .*ConnectionRefusedError.*\(attempt 3\)"):
        post(endpoint(f"http://127.0.0.1:{port}"))


def test_answer_that_is_broken_off_is_asked_for_again(serve):
    server = serve(lambda request: (200, b"[1", {"Content-Length": "5"} if len(server.requests) < 2 else {}))
    with pytest.raises(BackendError, match=r"no JSON: '\[1' \(attempt 2\)"):
        post(endpoint(server))
    assert len(server.requests) == 2


def test_garbage_instead_of_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x00\xffgarbage\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(BackendError, match="RemoteProtocolError"):
            post(endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0))
        thread.join()


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe\x00", b"[" * 900, b"[" * 9000], ids=repr)
def test_answer_that_is_no_json(serve, body):
    server = serve(lambda request: body)
    with pytest.raises(BackendError, match="answered no JSON"):
        post(endpoint(server, max_response_bytes=10_000))
    assert len(server.requests) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_answer_that_is_too_long(serve, chunked):
    body = b"3f0\r\n" + b"1" * 0x3F0 + b"\r\n0\r\n\r\n" if chunked else b"1" * 1008
    headers = {"Transfer-Encoding": "chunked"} if chunked else {}
    server = serve(lambda request: (200, body, headers))
    with pytest.raises(BackendError, match="max_response_bytes=1000"):
        post(endpoint(server))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        lambda request: (500, request.headers["Authorization"].encode(), {}),
        lambda request: (403, request.headers["Authorization"].encode() * 99, {}),
        lambda request: request.headers["Authorization"].encode(),
    ],
    ids=["500", "403", "no json"],
)
def test_echoed_token_is_neither_raised_nor_logged(serve, token, reply, caplog):
    server = serve(reply)
    point = endpoint(server, token_env=token)
    with caplog.at_level(logging.DEBUG, logger="flowcorr"), pytest.raises(BackendError) as caught:
        post(point)
    assert "***" in str(caught.value)
    assert TOKEN not in f"{caught.value} {caplog.text} {point!r}"
    assert caught.value.__cause__ is None


def test_an_echoed_path_is_not_raised(serve):
    """As servers answer a path that they do not know."""
    server = serve(lambda request: (404, f"{request.path} was not found on this server".encode(), {}))
    with pytest.raises(BackendError, match=r"/\*\*\* .*status 404: \*\*\* ") as caught:
        post(endpoint(f"{server.url}/v1/hidden/score?key=hidden"))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("place", ["score?key=hidden", "hidden/score"])
def test_no_log_shows_more_of_an_address_than_its_host(place, serve, caplog):
    server = serve(lambda request: [1])
    with caplog.at_level(logging.DEBUG):
        post(endpoint(f"{server.url}/{place}"))
    assert "POST" in caplog.text
    assert "hidden" not in "".join(line for line in caplog.text.splitlines() if " server:" not in line)


def test_compressed_answers_are_not_unpacked(serve):
    body = gzip.compress(b"1" * 10**6)
    server = serve(lambda request: (200, body, {"Content-Encoding": "gzip"}))
    with pytest.raises(BackendError, match="answered no JSON"):
        post(endpoint(server, max_response_bytes=2000))
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def test_certificate_is_checked(secure, certificate, monkeypatch):
    with pytest.raises(BackendError, match=r"certificate .*\(self-signed .*verify"):
        post(endpoint(secure))
    assert secure.requests == []
    assert post(endpoint(secure, verify=str(certificate[0]))) == [1]
    monkeypatch.setenv("HOME", str(certificate[0].parent))
    assert post(endpoint(secure, verify=f"~/{certificate[0].name}")) == [1]
    assert post(endpoint(secure, verify=False)) == [1]


def test_unencrypted_token_is_warned_of(token, caplog):
    endpoint("http://127.0.0.1:1", token_env=token)
    endpoint("https://scorer.example", token_env=token)
    assert caplog.text == ""
    endpoint("http://scorer.example", token_env=token)
    assert "scorer.example" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("proxy", ["ftp://me:pass@proxy", "socks9://proxy", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_refused_at_construction_and_by_a_worker(serve, monkeypatch, proxy):
    """Every sample would fail, none of them by its own fault."""
    point = endpoint(serve(lambda request: [1]))
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("ALL_PROXY", proxy)
    for use in (lambda: endpoint("http://scorer.example"), lambda: post(point)):
        with pytest.raises(ConfigError, match="NO_PROXY") as caught:
            use()
        assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "  ", "two words", "line\r\nbreak", "ключ"])
def test_unusable_token_is_refused_at_construction_without_showing_it(monkeypatch, value):
    monkeypatch.setenv("SCORER_TOKEN", value)
    with pytest.raises(ConfigError, match="'SCORER_TOKEN'") as caught:
        endpoint("http://localhost", token_env="SCORER_TOKEN")
    assert not value.strip() or value not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(
            ({"url": url}, "url must")
            for url in (
                "localhost:8000",
                "file:///etc/passwd",
                "http://",
                "http://host:port",
                "scorer/hidden",
                "ftp://scorer/hidden",
                "hidden",
            )
        ),
        ({"url": "https://me:hidden@host/"}, "address of host "),
        ({"token_env": "NOT_SET_ANYWHERE"}, "variable 'NOT_SET_ANYWHERE'"),
        ({"token_env": "sk-hidden"}, r"variable '\*\*\*'"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"retries": -1}, "retries=-1"),
        ({"retries": True}, "retries=True"),
        ({"backoff": "1"}, "backoff=<str>"),
        ({"max_response_bytes": 0}, "max_response_bytes=0"),
        ({"verify": "/no/such/file.pem"}, "verify='/no/such/file.pem'"),
        ({"verify": ""}, "verify=''"),
        ({"verify": 1}, "verify=1"),
    ],
    ids=str,
)
def test_bad_options_are_refused_and_no_secret_is_shown(options, named):
    with pytest.raises(ConfigError, match=f"^reward http: .*{named}") as caught:
        endpoint("http://localhost", **options)
    assert "hidden" not in str(caught.value)


def test_threads_keep_the_order_and_overlap():
    barrier = threading.Barrier(3, timeout=300)

    def square(number):
        barrier.wait()
        return number**2

    assert map_in_threads(square, range(6), 3) == [0, 1, 4, 9, 16, 25]
    assert map_in_threads(square, [], 3) == []


def test_threads_stop_at_the_first_error():
    begun = []

    def fail(number):
        begun.append(number)
        raise ValueError(f"no {number}")

    with pytest.raises(ValueError, match="no 0"):
        map_in_threads(fail, range(1000), 1)
    assert begun == [0]


def test_png_keeps_every_pixel():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    decoded = Image.open(io.BytesIO(base64.b64decode(png_base64(image))))
    np.testing.assert_array_equal(np.asarray(decoded), image)
