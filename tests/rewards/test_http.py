import base64
import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from flowcorr.config import RewardTerm
from flowcorr.errors import BackendError, ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import HttpReward, build_reward, score_batch
from flowcorr.rewards.references import references_of
from tests.prompts import prompts_of

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
PROMPTS = [
    Prompt(text=f"prompt {place}", target="ß" * place, metadata={"place": place}) for place in range(5)
]


def received(request):
    """What a scorer reads: images, and the lists beside them."""
    if request.headers["Content-Type"] == "application/json":
        content = request.json()
        pictures = [Image.open(io.BytesIO(base64.b64decode(text))) for text in content.pop("images")]
        return np.stack([np.asarray(picture) for picture in pictures]), content
    with np.load(io.BytesIO(request.body), allow_pickle=False) as archive:
        return archive["images"], json.loads(str(archive["request"]))


def brightness(request):
    images, content = received(request)
    return {
        "scores": images.mean((1, 2, 3)).tolist(),
        "extra": {"place": [m["place"] for m in content["metadata"]]},
    }


def reward(server, **options):
    return HttpReward(**{"url": server.url, "backoff": 0.001, "timeout": 300.0, **options})


@pytest.mark.parametrize("format", ["json", "npz"])
@pytest.mark.parametrize(("batch_size", "concurrency"), [(32, 1), (2, 1), (2, 3), (1, 2)])
def test_scores_do_not_depend_on_format_or_batching(serve, format, batch_size, concurrency):
    server = serve(brightness)
    scored = reward(server, format=format, batch_size=batch_size, concurrency=concurrency)(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scored.scores, IMAGES.mean((1, 2, 3)))
    np.testing.assert_array_equal(scored.extra["place"], range(5))
    assert len(server.requests) == -(-5 // batch_size)


@pytest.mark.parametrize("format", ["json", "npz"])
def test_the_server_receives_everything(serve, format):
    server = serve(brightness)
    reward(server, format=format)(IMAGES, PROMPTS)
    images, content = received(server.requests[0])
    np.testing.assert_array_equal(images, IMAGES)
    assert content == {
        "prompts": [prompt.text for prompt in PROMPTS],
        "targets": [prompt.target for prompt in PROMPTS],
        "metadata": [{"place": place} for place in range(5)],
    }


@pytest.mark.parametrize("format", ["json", "npz"])
def test_the_server_receives_reference_images(serve, format):
    server, edits = serve(lambda _: {"scores": [0] * 5}), prompts_of("abcde", images=2)
    reward(server, format=format)(IMAGES, edits)
    (request,) = server.requests
    if format == "json":
        sent = [
            [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in own]
            for own in request.json()["references"]
        ]
    else:
        with np.load(io.BytesIO(request.body), allow_pickle=False) as archive:
            sent = archive["references"]
    np.testing.assert_array_equal(np.array(sent), np.array(references_of(edits, *IMAGES.shape[1:3])))


def test_missing_target_is_null(serve):
    server = serve(lambda request: {"scores": [0]})
    assert reward(server)(IMAGES[:1], [Prompt(text="a")]).scores.tolist() == [0.0]
    assert server.requests[0].json()["targets"] == [None]


def test_null_fails_that_sample(serve):
    server = serve(lambda request: {"scores": [1, 2, None, 4, 5], "extra": {"raw": [None, 1, 1, 1, 1]}})
    with pytest.raises(BackendError, match="sample 2 .*'prompt 2'"):
        score_batch(reward(server), IMAGES, PROMPTS)
    output = score_batch(reward(server), IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(output.scores, [1, 2, np.nan, 4, 5])
    np.testing.assert_array_equal(output.extra["raw"], [np.nan, 1, np.nan, 1, 1])


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([1, 2, 3, 4, 5], 'no object .*"scores"'),
        ({"score": [1]}, 'no object .*"scores"'),
        ({"scores": 3}, '"scores" .* list'),
        ({"scores": [1, 2]}, '2 .*"scores" .* 5 '),
        ({"scores": [1, 2, 3, 4, 5, 6]}, '6 .*"scores" .* 5 '),
        ({"scores": [1, 2, 3, 4, "5"]}, 'str .*"scores" .* 4;'),
        ({"scores": [1, True, 3, 4, 5]}, 'bool .*"scores" .* 1;'),
        ({"scores": [[1], 2, 3, 4, 5]}, 'list .*"scores" .* 0;'),
        ({"scores": [10**400, 2, 3, 4, 5]}, '"scores" .*too large'),
        ({"scores": [1] * 5, "extra": [1]}, '"extra" .* object'),
        ({"scores": [1] * 5, "extra": {"a": [1]}}, '1 .*"extra.a" .* 5 '),
        ({"scores": [1] * 5, "extra": {"a\nb": [1] * 5}}, r"'a\\nb' in extra"),
    ],
    ids=str,
)
def test_other_answers_are_refused_with_the_address(serve, answer, named):
    server = serve(lambda request: answer)
    with pytest.raises(BackendError, match=f"{server.url} .*{named}"):
        reward(server)(IMAGES, PROMPTS)
    assert len(server.requests) == 1


def test_extras_must_be_the_same_for_all_requests(serve):
    server = serve(lambda request: {"scores": [1], "extra": {f"n{len(server.requests)}": [1]}})
    with pytest.raises(BackendError, match=r"\['n\d'\] in extra .*\['n\d'\]"):
        reward(server, batch_size=1)(IMAGES, PROMPTS)


def test_server_that_is_down_is_not_asked_for_every_sample(serve):
    server = serve(lambda request: (503, b"", {}))
    for on_error in ("fail", "drop_group"):
        server.requests.clear()
        with pytest.raises(BackendError, match="status 503"):
            score_batch(reward(server, retries=1), IMAGES, PROMPTS, on_error=on_error)
        assert len(server.requests) == 2


def test_oversized_answer_is_refused(serve):
    server = serve(lambda request: {"scores": [1] * 5, "extra": {"a": [0.123456789] * 5}})
    with pytest.raises(BackendError, match="max_response_bytes=50"):
        reward(server, max_response_bytes=50)(IMAGES, PROMPTS)


def test_reward_of_a_recipe_can_be_pickled_and_shows_no_token(serve, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    server = serve(brightness)
    options = {"url": server.url, "token_env": "SCORER_TOKEN"}
    scorer = build_reward([RewardTerm(name="http", weight=2, options=options)])
    stored = pickle.dumps(scorer)
    assert b"s3cret" not in stored
    assert "s3cret" not in repr(scorer)
    np.testing.assert_array_equal(pickle.loads(stored)(IMAGES, PROMPTS).scores, 2 * IMAGES.mean((1, 2, 3)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"format": "pickle"}, "format='pickle' .*json, npz"),
        ({"batch_size": 0}, "batch_size=0 "),
        ({"concurrency": 0}, "concurrency=0 "),
        ({"token_env": ["SCORER_TOKEN"]}, "token_env=<list> "),
        ({"url": "scorer"}, "url must"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, named):
    with pytest.raises(ConfigError, match=f"^reward http: {named}"):
        HttpReward(**{"url": "http://localhost", **options})
