"""A reward service that times out, refuses and talks nonsense: the run ends with what it has, and goes on later."""

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from flowcorr import trainer
from flowcorr.errors import BackendError
from flowcorr.trackers.jsonl import read_metrics

OPTIONS = {"timeout": 300, "retries": 1, "backoff": 0.01}
PATIENCE = 5  # seconds that a run waits for a service that does not answer; one that does takes milliseconds


class Scorer(ThreadingHTTPServer):
    """Scores images by their brightness, until it is told to misbehave."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.mood, self.asked, self.bad = "well", 0, range(0)
        self.stopping = threading.Event()

    def reply(self, request):
        self.asked += 1
        images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(image)))) for image in request["images"]]
        scores = [float(image.mean()) for image in images]
        if self.asked not in self.bad:
            return 200, json.dumps({"scores": scores})
        if self.mood == "slow":
            self.stopping.wait(600)
        if self.mood == "null":
            scores[0] = None
        return {
            "error": (500, "out of memory"),
            "garbage": (200, "<html>welcome</html>"),
            "too few": (200, json.dumps({"scores": scores[1:]})),
        }.get(self.mood, (200, json.dumps({"scores": scores})))


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status, text = self.server.reply(json.loads(body))
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except ConnectionError:
            pass  # nobody waits any more

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(scope="module")
def scorer():
    server = Scorer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stopping.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def reward(scorer):
    """Options of the reward -> the override that scores with the server."""
    scorer.bad = range(0)

    def override(**changed):
        options = {"url": f"http://127.0.0.1:{scorer.server_port}/score", **OPTIONS, **changed}
        return f"reward.terms=[{{name: http, options: {json.dumps(options)}}}]"

    return override


LOCAL, RAY = "reward.placement=local", "reward.placement=ray"


@pytest.mark.system
@pytest.mark.parametrize(
    ("mood", "message", "placement"),
    [
        ("slow", rf"did not answer within timeout={PATIENCE} s \(attempt 1\)", LOCAL),
        ("error", r"answered status 500: out of memory \(attempt 2\)", LOCAL),
        pytest.param("error", r"status 500: out of memory \(attempt 2\)", RAY, marks=pytest.mark.faults),
        ("garbage", r"answered no JSON: '<html>welcome", LOCAL),
        pytest.param("garbage", r"answered no JSON: '<html>welcome", RAY, marks=pytest.mark.faults),
        ("too few", r"answered \d+ numbers in \"scores\" for \d+ images", LOCAL),
    ],
)
def test_a_service_that_fails_ends_the_run_which_later_goes_on(
    bench, request, scorer, reward, mood, message, placement, tmp_path, events
):
    if placement == RAY:
        request.getfixturevalue("ray_cluster")
    whole = bench.whole(reward())
    impatient = {"timeout": PATIENCE, "retries": 0} if mood == "slow" else {}
    settings = bench.settings(reward(**impatient), placement)
    # One evaluation, one step and its replay go well, each in one request.
    scorer.mood, scorer.bad = mood, range(scorer.asked + 4, 10**9)
    with pytest.raises(BackendError, match=message):
        trainer.train(settings, tmp_path)
    assert events(tmp_path)[-3:] == ["reward_failed", "checkpoint", "failure"]
    (failed,) = events(tmp_path, "reward_failed")
    assert "reward http" in failed["error"]

    scorer.bad = range(0)
    trainer.train(settings, tmp_path, resume=True)
    bench.assert_same(tmp_path, whole)
    assert [event["step"] for event in events(tmp_path, "resume")] == [1]


@pytest.mark.parametrize("placement", [LOCAL, pytest.param(RAY, marks=pytest.mark.faults)])
def test_single_images_that_fail_cost_their_groups(
    bench, request, scorer, reward, placement, tmp_path, events
):
    if placement == RAY:
        request.getfixturevalue("ray_cluster")
    scorer.mood, scorer.bad = "null", range(scorer.asked + 2, scorer.asked + 3)
    settings = bench.settings(reward(), placement, "reward.on_error=drop_group", "trainer.total_steps=2")
    assert trainer.train(settings, tmp_path).status == "finished"
    (failed,) = events(tmp_path, "reward_failed")
    assert (failed["step"], failed["samples"], failed["of"]) == (0, 1, 8)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.get("reward/failed_samples") for record in records] == [None, 1, 0]
