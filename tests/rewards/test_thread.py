"""A reward in a thread of its own gives what it gives in the trainer's, while the trainer does other work."""

import threading

import numpy as np
import pytest
import torch

from flowcorr.config import RewardTerm
from flowcorr.errors import BackendError, BatchError
from flowcorr.records import Prompt
from flowcorr.rewards import (
    JpegCompressibility,
    JpegIncompressibility,
    OcrReward,
    ThreadReward,
    WeightedSum,
    build_reward,
    reward_name,
    score_batch,
    scored_ahead,
)
from flowcorr.rewards.combine import Scorer
from flowcorr.rewards.thread import MAX_WAITING

IMAGES = np.random.default_rng(0).integers(0, 255, (7, 16, 24, 3), dtype=np.uint8)
PROMPTS = [Prompt(text=f"image {index}") for index in range(7)]
PARTS = (slice(0, 3), slice(3, 4), slice(4, 7))
PATIENCE = 60.0
RELEASED = threading.Event()
CALLS: list[tuple[str, str]] = []


def patient(images, prompts):
    CALLS.append((prompts[0].text, threading.current_thread().name))
    assert RELEASED.wait(PATIENCE)
    return images.mean((1, 2, 3))


def picky(images, prompts):
    if any(prompt.text in ("image 3", "image 5") for prompt in prompts):
        raise ValueError("not this one")
    return images.mean((1, 2, 3))


def short(images, prompts):
    return [0.0] * (len(prompts) - 1)


@pytest.fixture(autouse=True)
def _afresh():
    RELEASED.clear()
    CALLS.clear()
    yield
    RELEASED.set()


@pytest.fixture
def start():
    """Rewards -> their sum in the trainer's thread, and in one of its own."""
    started = []

    def enter(*rewards, timeout=None):
        scorers = tuple(Scorer(label=reward_name(reward), reward=reward, weight=0.5) for reward in rewards)
        local = WeightedSum(scorers=scorers, timeout=timeout)
        started.append(ThreadReward(local))
        return local, started[-1]

    yield enter
    RELEASED.set()
    for reward in started:
        reward.close()


def ahead_of(reward):
    """A reward that was given all images in parts."""
    ahead, on_images = scored_ahead(reward, PROMPTS)
    for part in PARTS:
        on_images(torch.tensor(IMAGES[part]))
    return ahead


def test_scores_of_parts_are_those_of_one_call(start):
    local, threaded = start(JpegCompressibility(), JpegIncompressibility())
    expected = score_batch(local, IMAGES, PROMPTS)
    for reward in (threaded, ahead_of(threaded)):
        found = score_batch(reward, IMAGES, PROMPTS)
        np.testing.assert_array_equal(found.scores, expected.scores)
        for name in ("extra", "terms"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.keys() == theirs.keys()
            assert all((ours[key] == theirs[key]).all() for key in ours)
        assert not found.failed.any()


def test_the_trainer_goes_on_while_parts_are_scored_in_order(start):
    _, threaded = start(patient)
    ahead = ahead_of(threaded)  # a call in this thread would wait for the release
    RELEASED.set()
    scores = score_batch(ahead, IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores.scores, 0.5 * IMAGES.mean((1, 2, 3)))
    assert [(f"image {part.start}", "rewards") for part in PARTS] == CALLS


def test_images_beyond_the_prompts_are_left_out(start):
    _, threaded = start(JpegCompressibility())
    ahead, on_images = scored_ahead(threaded, PROMPTS[:5])
    for part in PARTS:
        on_images(torch.tensor(IMAGES[part]))
    expected = score_batch(threaded, IMAGES[:5], PROMPTS[:5])
    found = score_batch(ahead, IMAGES[:5], PROMPTS[:5])
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_failures_are_found_and_named_as_in_one_call(start, caplog):
    local, threaded = start(picky, JpegCompressibility())
    seen = []
    for reward in (local, ahead_of(threaded)):
        caplog.clear()
        found = score_batch(reward, IMAGES, PROMPTS, on_error="drop_group")
        assert np.flatnonzero(found.failed).tolist() == [3, 5]
        with pytest.raises(BackendError) as caught:
            score_batch(local if reward is local else ahead_of(threaded), IMAGES, PROMPTS)
        seen.append((caplog.messages, str(caught.value), found.scores.tolist()))
    np.testing.assert_equal(seen[0], seen[1])
    assert "sample 3 (prompt 'image 3')" in seen[0][1]


@pytest.mark.parametrize(
    ("reward", "named"),
    [(short, r"reward short .*\[6\]; .* \[7\]"), (OcrReward(), "reward ocr: sample 0 .* target;")],
)
def test_errors_that_are_no_samples_fault_are_those_of_one_call(start, reward, named):
    local, threaded = start(reward)
    for called in (local, ahead_of(threaded)):
        with pytest.raises(BatchError, match=named):
            score_batch(called, IMAGES, PROMPTS)


def test_the_log_names_the_reward_that_is_waited_for(start, caplog):
    _, threaded = start(JpegCompressibility(), patient, timeout=0.01)
    ahead = ahead_of(threaded)
    while not caplog.messages:
        assert not RELEASED.wait(0.01)
    RELEASED.set()
    score_batch(ahead, IMAGES, PROMPTS)
    assert "reward patient" in caplog.messages[0]


def test_sampling_waits_when_many_calls_wait(start):
    _, threaded = start(patient)
    submitted = threading.Semaphore(0)

    def submit():
        for _ in range(MAX_WAITING + 2):
            threaded.submit(IMAGES[:1], PROMPTS[:1])
            submitted.release()

    sampling = threading.Thread(target=submit, daemon=True)
    sampling.start()
    assert all(submitted.acquire(timeout=PATIENCE) for _ in range(MAX_WAITING + 1))
    assert not submitted.acquire(timeout=0.05)
    RELEASED.set()
    assert submitted.acquire(timeout=PATIENCE)


def test_the_end_of_a_run_ends_the_thread_and_begins_no_call(start):
    others = set(threading.enumerate())
    _, threaded = start(patient)
    first, second, third = (threaded.submit(IMAGES[part], PROMPTS[part]) for part in PARTS)
    while not CALLS:
        assert not RELEASED.wait(0.01)
    threading.Timer(0.05, RELEASED.set).start()
    threaded.close()
    assert first.done()
    assert not first.cancelled()
    assert second.cancelled()
    assert third.cancelled()
    assert len(CALLS) == 1
    assert "rewards" not in [thread.name for thread in set(threading.enumerate()) - others]


@pytest.mark.parametrize(
    ("rewards", "overlaps"),
    [
        ((OcrReward(), JpegCompressibility()), True),
        ((JpegCompressibility(), picky), False),
    ],
)
def test_a_sum_overlaps_if_every_term_does(start, rewards, overlaps):
    local, _ = start(*rewards)
    assert local.overlaps is overlaps


def test_a_users_function_says_so_by_an_attribute(tmp_path, monkeypatch):
    (tmp_path / "limited_reward.py").write_text(
        "def limited(images, prompts, limit):\n    return images.mean((1, 2, 3)).clip(max=limit)\n"
        "limited.overlaps = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    term = RewardTerm(name="limited_reward:limited", options={"limit": 100.0})
    assert build_reward([term]).overlaps


def test_the_thread_computes_on_the_gpu_of_the_thread_that_made_it(start, monkeypatch):
    """CUDA keeps a current device for each thread; on one of several ranks it is not the first."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: chosen.append((threading.current_thread().name, gpu))
    )
    start(JpegCompressibility())[1](IMAGES, PROMPTS)
    assert chosen == [("rewards", 3)]
