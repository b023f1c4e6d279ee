import errno
import logging
import socket
import urllib.request
from urllib.error import HTTPError

import httpx2
import numpy as np
import pytest
import torch

from flowcorr.errors import BackendError, BatchError, MissingExtraError
from flowcorr.records import Prompt
from flowcorr.rewards import RewardOutput, as_reward_output, report_broken, score_batch

PROMPTS = [Prompt(text=f"prompt {index}") for index in range(4)]
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.ones((4, 2, 2, 3), dtype=np.uint8)


def first_pixel(images, prompts):
    return images[:, 0, 0, 0].astype(float)


def dislikes_two(images, prompts):
    if (images[:, 0, 0, 0] == 2).any():
        raise ValueError("two is not nice")
    return RewardOutput(
        scores=first_pixel(images, prompts), extra={"square": first_pixel(images, prompts) ** 2}
    )


def nan_at_one(images, prompts):
    scores = first_pixel(images, prompts)
    return np.where(scores == 1, np.nan, scores)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1.0, 2.0, 3.0),
        np.array([1, 2, 3], dtype=np.float32),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        list(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)),
        RewardOutput(scores=np.array([1.0, 2.0, 3.0])),
    ],
    ids=["list", "tuple", "array", "tensor", "tensors", "output"],
)
def test_as_reward_output_takes_any_numbers(value):
    output = as_reward_output(value, 3, "mine")
    assert output.scores.dtype == np.float64
    assert output.scores.tolist() == [1.0, 2.0, 3.0]
    assert output.extra == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], r"reward mine returned shape \[2\].*\[3\]"),
        (1.0, r"returned shape \[\]"),
        (None, "^reward mine .* None; .* 3 images"),
        (np.zeros((3, 1)), r"returned shape \[3, 1\]"),
        ([torch.zeros(1)] * 3, r"returned shape \[3, 1\]"),
        (["a", "b", "c"], "returned list, .*'a'"),
        ([10**400] * 3, "returned list, .*too large"),
        ({"score": [1, 2, 3]}, "returned dict"),
        (RewardOutput(scores=np.zeros(3), extra={"hits": np.zeros(2)}), r"mine.extra\['hits'\].*\[2\]"),
    ],
    ids=["short", "scalar", "none", "column", "tensors", "texts", "huge", "dict", "extra"],
)
def test_as_reward_output_refuses_other_shapes(value, message):
    with pytest.raises(BatchError, match=message):
        as_reward_output(value, 3, "mine")


@pytest.mark.parametrize("on_error", ["fail", "drop_group"])
def test_good_batch_has_no_failure(on_error):
    output = score_batch(first_pixel, IMAGES, PROMPTS, on_error=on_error)
    assert output.scores.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert output.failed.dtype == bool
    assert not output.failed.any()


def test_fail_names_sample_prompt_reward_and_cause():
    named = "dislikes_two .*sample 2 .*'prompt 2'.*ValueError: two is not nice;.*drop_group"
    with pytest.raises(BackendError, match=named) as caught:
        score_batch(dislikes_two, IMAGES, PROMPTS)
    assert isinstance(caught.value.__cause__, ValueError)


def test_fail_names_non_finite_sample():
    with pytest.raises(BackendError, match="nan_at_one .*sample 1 .*'prompt 1'.* nan,"):
        score_batch(nan_at_one, IMAGES, PROMPTS)


def test_drop_group_marks_the_samples_that_raise(caplog):
    with caplog.at_level(logging.WARNING):
        output = score_batch(dislikes_two, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(output.scores, [0.0, 1.0, np.nan, 3.0])
    np.testing.assert_array_equal(output.extra["square"], [0.0, 1.0, np.nan, 9.0])
    assert "1 of 4" in caplog.text


def test_drop_group_marks_non_finite_samples():
    output = score_batch(nan_at_one, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(output.scores, [0.0, np.nan, 2.0, 3.0])


def test_infinite_scores_and_their_extras_become_nan():
    def infinite_at_three(images, prompts):
        scores = np.array([0.0, 1.0, 2.0, -np.inf])
        return RewardOutput(scores=scores, extra={"raw": np.ones(4)})

    output = score_batch(infinite_at_three, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, False, True]
    np.testing.assert_array_equal(output.scores, [0.0, 1.0, 2.0, np.nan])
    np.testing.assert_array_equal(output.extra["raw"], [1.0, 1.0, 1.0, np.nan])


def test_an_infinite_extra_is_a_failure_and_a_missing_one_is_none():
    def partly_known(images, prompts):
        return RewardOutput(scores=np.arange(4.0), extra={"raw": np.array([1.0, np.nan, np.inf, 2.0])})

    output = score_batch(partly_known, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True, False]


def test_samples_without_a_picture_are_left_to_no_reward(caplog):
    broken = {2: "image 2 of group 0: nothing"}
    with pytest.raises(BackendError, match=rf"^sample 2 .*'prompt 2'.*: {broken[2]} \(1 of 4"):
        report_broken(PROMPTS, broken, "fail")
    with caplog.at_level(logging.WARNING):
        report_broken(PROMPTS, broken, "drop_group")
    assert "1 of 4" in caplog.text
    output = score_batch(dislikes_two, IMAGES, PROMPTS, broken=broken)  # it would raise on that one
    assert output.failed.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(output.scores, [0.0, 1.0, np.nan, 3.0])
    np.testing.assert_array_equal(output.extra["square"], [0.0, 1.0, np.nan, 9.0])


def test_a_failure_beside_a_missing_picture_keeps_its_place():
    with pytest.raises(BackendError, match="dislikes_two .*sample 2 .*'prompt 2'"):
        score_batch(dislikes_two, IMAGES, PROMPTS, broken=[0])


def test_drop_group_marks_all_when_all_raise():
    def broken(images, prompts):
        raise ValueError("no words")

    output = score_batch(broken, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.all()
    assert np.isnan(output.scores).all()


def test_batch_that_only_fails_as_a_whole():
    def one_at_a_time(images, prompts):
        if len(prompts) > 1:
            raise ValueError("too many")
        return first_pixel(images, prompts)

    with pytest.raises(BackendError, match="one_at_a_time .*ValueError: .* 4 samples"):
        score_batch(one_at_a_time, IMAGES, PROMPTS)
    output = score_batch(one_at_a_time, IMAGES, PROMPTS, on_error="drop_group")
    assert not output.failed.any()
    assert output.scores.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "error", [BatchError("no target"), MissingExtraError("reward x", "y", "z")], ids=["batch", "extra"]
)
def test_mistakes_in_the_set_up_are_never_dropped(error):
    def misconfigured(images, prompts):
        raise error

    with pytest.raises(type(error)):
        score_batch(misconfigured, IMAGES, PROMPTS, on_error="drop_group")


def test_wrong_number_of_scores_is_never_dropped():
    with pytest.raises(BatchError, match=r"shape \[1\]; .* \[4\]"):
        score_batch(lambda images, prompts: [1.0], IMAGES, PROMPTS, on_error="drop_group")


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (IMAGES.astype(np.float32), r"\(4, 2, 2, 3\) .* float32"),
        (IMAGES[0], r"\(2, 2, 3\) .* uint8"),
        (IMAGES.transpose(0, 3, 1, 2), r"\(4, 3, 2, 2\) .* uint8"),
        (IMAGES[:3], "4 prompts .* 3 images"),
    ],
    ids=["float", "one", "channels first", "too few"],
)
def test_images_are_checked(images, named):
    with pytest.raises(BatchError, match=named):
        score_batch(first_pixel, images, PROMPTS)


def test_reward_that_knows_why_says_so(caplog):
    def unsure(images, prompts):
        scores = np.where(images[:, 0, 0, 0] == 1, np.nan, 5.0)
        return RewardOutput(scores=scores, errors={1: reason})

    reason = "too dark"
    with pytest.raises(BackendError, match=rf"unsure .*sample 1 .*'prompt 1'\): {reason};"):
        score_batch(unsure, IMAGES, PROMPTS)
    output = score_batch(unsure, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False, False]
    assert reason in caplog.text


@pytest.mark.parametrize("on_error", ["fail", "drop_group"])
def test_service_that_is_down_is_asked_once(on_error):
    calls = []

    def down(images, prompts):
        calls.append(len(prompts))
        raise error

    error = BackendError("the scorer is down")
    with pytest.raises(BackendError) as caught:
        score_batch(down, IMAGES, PROMPTS, on_error=on_error)
    assert caught.value is error
    assert calls == [4]


def by_urllib(url, body=b"{}"):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60) as answer:
            answer.read()
    except HTTPError as error:
        error.close()
        raise


def by_httpx(url):
    httpx2.post(url, json={}, trust_env=False)


def by_wrapper(url):
    try:
        by_urllib(url)
    except OSError as error:
        raise RuntimeError("no scores") from error


@pytest.mark.parametrize("on_error", ["fail", "drop_group"])
@pytest.mark.parametrize("ask", [by_urllib, by_httpx, by_wrapper])
def test_a_service_of_an_own_reward_that_cannot_be_reached_is_no_samples_fault(ask, on_error, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    calls = []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen

        def scorer(images, prompts):
            calls.append(len(prompts))
            ask(f"http://127.0.0.1:{closed.getsockname()[1]}/")

        with pytest.raises(BackendError, match=rf"^reward scorer: .*Errno {errno.ECONNREFUSED}\]"):
            score_batch(scorer, IMAGES, PROMPTS, on_error=on_error)
    assert calls == [4]


@pytest.mark.parametrize(("status", "of_sample"), [(422, True), (400, True), (404, False), (503, False)])
def test_a_service_may_refuse_a_sample(serve, status, of_sample):
    server = serve(lambda request: (status, b"", {}) if request.body == b"2" else {})

    def reward(images, prompts):
        for value in first_pixel(images, prompts):
            by_urllib(server.url, b"%d" % value)
        return first_pixel(images, prompts)

    if of_sample:
        assert score_batch(reward, IMAGES, PROMPTS, on_error="drop_group").failed.tolist() == [
            False,
            False,
            True,
            False,
        ]
        return
    with pytest.raises(BackendError, match=f"^reward reward: .*HTTP Error {status}"):
        score_batch(reward, IMAGES, PROMPTS, on_error="drop_group")


def test_terms_and_errors_survive_scoring_one_by_one(caplog):
    def one_at_a_time(images, prompts):
        if len(prompts) > 1:
            raise ValueError("too many")
        value = first_pixel(images, prompts)
        scores = np.where(value == 2, np.nan, value)
        return RewardOutput(
            scores=scores, terms={"a": value + 10}, errors={0: "no two"} if value == 2 else {}
        )

    output = score_batch(one_at_a_time, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(output.terms["a"], [10, 11, np.nan, 13])
    assert "sample 2 (prompt 'prompt 2'): no two" in caplog.text
