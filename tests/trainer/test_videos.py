"""Films of videos, and a run that makes videos from its first step to its report."""

import io
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_pipelines
from PIL import Image

from flowcorr.config import load
from flowcorr.records import Prompt
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import train
from flowcorr.trainer.events import read_events
from flowcorr.trainer.images import Shown
from flowcorr.trainer.videos import MAX_GIF_VIDEOS, MAX_VIDEOS, animated_gif, save_film, save_samples
from tests.trainer.runs import assert_same_run

LEVELS = np.linspace(0, 255, 5).astype(np.uint8)
VIDEOS = np.broadcast_to(LEVELS[:, None, None, None], (10, 5, 31, 40, 3))
PROMPTS = [Prompt(text="a cat")] * 10


def shown(rate, scores=None):
    return Shown(images=VIDEOS, prompts=PROMPTS, scores=scores, rate=rate)


def brightness(path):
    """Levels of a pixel of the first video, frame by frame."""
    if path.suffix == ".webp":
        with Image.open(path) as film:
            frames = [film.seek(frame) or film.convert("RGB") for frame in range(film.n_frames)]
    else:
        av = pytest.importorskip("av")
        with av.open(str(path)) as film:
            frames = [frame.to_image() for frame in film.decode(video=0)]
    assert len({frame.size for frame in frames}) == 1
    return [frame.getpixel((20, 20))[0] for frame in frames], frames[0].size


def test_a_film_shows_every_frame(tmp_path):
    av = pytest.importorskip("av")
    save_samples(shown(24), tmp_path / "images" / "eval_after")
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"eval_after.png", "eval_after.mp4"}
    levels, size = brightness(tmp_path / "images" / "eval_after.mp4")
    assert levels == pytest.approx(LEVELS.tolist(), abs=3)
    assert size[0] % 2 == size[1] % 2 == 0
    assert size[0] == 4 * 120 + 3 * 4  # of the first eight videos, in rows of four
    assert MAX_VIDEOS == 8
    with av.open(tmp_path / "images" / "eval_after.mp4") as film:
        assert film.streams.video[0].average_rate == 24


@pytest.mark.parametrize("av", [None, SimpleNamespace(codecs_available={"mpeg4"})])
def test_without_av_or_its_encoder_it_is_an_animated_webp(tmp_path, monkeypatch, av):
    monkeypatch.setitem(sys.modules, "av", av)
    save_film(shown(16, scores=np.zeros(10)), tmp_path / "rollout_000002")
    levels, _ = brightness(tmp_path / "rollout_000002.webp")
    assert levels == pytest.approx(LEVELS.tolist(), abs=6)


def test_trackers_get_every_frame():
    with Image.open(io.BytesIO(animated_gif(shown(16)))) as film:
        frames = [film.seek(frame) or film.convert("RGB") for frame in range(film.n_frames)]
        assert film.info["duration"] == 60  # milliseconds, in whole hundredths of a second
    assert [frame.getpixel((20, 20))[0] for frame in frames] == LEVELS.tolist()
    assert frames[0].width == MAX_GIF_VIDEOS * 120 + 3 * 4


def test_images_have_no_film(tmp_path):
    save_samples(Shown(images=VIDEOS[:, 0], prompts=PROMPTS), tmp_path / "eval_before")
    assert [path.name for path in tmp_path.iterdir()] == ["eval_before.png"]


NUM_ELEMENTS = {"wan": 16 * 3 * 8 * 8, "wan22_ti2v": 48 * 3 * 4 * 4}


@pytest.fixture(scope="module", params=NUM_ELEMENTS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name, tmp_path_factory):
    return tiny_pipelines.PIPELINES[name].build(tmp_path_factory.mktemp(name))


def run_config(model, *overrides):
    """Two training steps of 9 frames of 64 x 64 pixels."""
    return load(
        "wan_ocr_lora",
        [
            *tiny_pipelines.overrides(model, (64, 64), "float32", 9),
            "model.max_sequence_length=24",
            "rollout.n=2",
            "sampling.num_inference_steps=6",
            "sampling.sde_window_size=2",
            'reward.terms=[{"name":"jpeg_incompressibility","frames":"every 4"}]',
            "data.num_heldout=2",
            "trainer.total_steps=2",
            "trainer.eval_num_inference_steps=3",
            "trainer.save_every=1",
            "trainer.keep_checkpoints=3",
            *overrides,
        ],
    )


def decoupled(model):
    """The configuration of `finished`."""
    return run_config(
        model,
        "algorithm.rollout_correction.preset=decoupled_token_is",
        "trainer.image_every=1",
        "trainer.trackers=[tensorboard]",
    )


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """The folder of a run in decoupled mode."""
    folder = tmp_path_factory.mktemp("videos") / "run"
    result = train(decoupled(model), folder)
    assert (result.status, result.step) == ("finished", 2)
    return folder


def assert_trained(name, folder):
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "reward/mean" in record]
    assert len(records) == 2
    for record in records:
        assert all(math.isfinite(value) for value in record.values())
        assert record["actor/grad_norm"] > 0
        assert record["rollout/num_elements"] == NUM_ELEMENTS[name]
        assert record["reward/image/motion"] > 0
        assert record["rollout_corr/logprob_abs_diff_mean"] < 1e-5
    (event,) = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "frames"]
    assert event["rules"] == {"jpeg_incompressibility": "every 4"}


def test_videos_are_trained_in_decoupled_mode(name, finished):
    assert_trained(name, finished)


def test_videos_are_trained_in_bypass_mode(name, model, tmp_path):
    preset = "algorithm.rollout_correction.preset=bypass_ppo_clip"
    train(run_config(model, preset, "trainer.image_every=0"), tmp_path / "run")
    assert_trained(name, tmp_path / "run")


def test_videos_are_shown(finished, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from flowcorr.instruments.page import save_page
    from flowcorr.instruments.report import report

    films = {path.name for path in (finished / "images").glob("*.mp4")}
    assert films == {"eval_before.mp4", "eval_after.mp4", "rollout_000001.mp4", "rollout_000002.mp4"}
    tracked = EventAccumulator(str(finished / "tensorboard"))
    tracked.Reload()
    assert [event.step for event in tracked.Images("eval/videos")] == [0, 2]
    assert [event.step for event in tracked.Images("rollout/videos")] == [1, 2]
    save_page(report([finished]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:video/mp4;base64,") == 2


def test_a_run_of_videos_resumes_to_equal_bits(model, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    assert train(decoupled(model), folder, resume=True).step == 2
    assert_same_run(finished, folder)
