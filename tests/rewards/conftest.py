import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A server on this machine; `reply` makes a body, or (status, body, headers), of a request."""

    reply: Callable[[Request], Any]
    requests: list[Request] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        request = Request(handler.path, dict(handler.headers), body)
        self.requests.append(request)
        reply = self.reply(request)
        status, body, headers = reply if isinstance(reply, tuple) else (200, reply, {})
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        with suppress(ConnectionError):  # some clients of these tests hang up
            handler.send_response(status)
            length = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(payload))}
            for name, value in {**length, **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(payload)


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[..., Server]]:
    """`serve(reply, ssl_context=None)` starts a server for the length of a test."""
    monkeypatch.setenv("no_proxy", "*")
    started = []

    def start(reply: Callable[[Request], Any], ssl_context: Any = None) -> Server:
        server = Server(reply)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, *arguments: Any) -> None:
                logging.getLogger("server").debug("%s", arguments)

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                logging.getLogger("server").debug("a client hung up", exc_info=True)

        listener = Quiet(("127.0.0.1", 0), Handler)
        scheme = "http"
        if ssl_context is not None:
            listener.socket = ssl_context.wrap_socket(listener.socket, server_side=True)
            scheme = "https"
        server.url = f"{scheme}://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, listener, thread))
        return server

    yield start
    for server, listener, thread in started:
        server.stopping.set()
        listener.shutdown()
        listener.server_close()
        thread.join()


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A CLIP checkpoint with random weights and its processor, whose tokenizer knows letters only."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    special = ["<|startoftext|>", "<|endoftext|>"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={
            **shape,
            "vocab_size": len(tokens),
            "max_position_embeddings": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={**shape, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(config)
    # Larger than CLIP's own start, so that embeddings differ by more than rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 8
    model.save_pretrained(folder)
    CLIPProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16),
    ).save_pretrained(folder)
    return str(folder)
