import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

pytest.importorskip("rapidocr")

from render_words import render

from flowcorr.errors import BatchError, ConfigError, MissingExtraError
from flowcorr.records import Prompt
from flowcorr.rewards import OcrReward
from flowcorr.rewards.ocr import compare, engine_error

TEXTS = st.text(alphabet="aAbc ß", max_size=6)
WORDS = ["abc", "word", "flow", "grpo", "test"]


@pytest.fixture(scope="module")
def reward():
    return OcrReward()


@pytest.fixture(scope="module")
def images():
    return render(WORDS, rng=np.random.default_rng(0))


def prompts(targets):
    return [Prompt(text=target, target=target) for target in targets]


def draw_lines(lines):
    canvas = Image.new("RGB", (320, 320), (240, 220, 180))
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text((30, 80 + 80 * number), line, font=ImageFont.load_default(size=44), fill=(120, 20, 20))
    return np.asarray(canvas)


def test_words_are_read(reward, images):
    output = reward(images, prompts(WORDS))
    assert output.scores.tolist() == [1.0] * len(WORDS)
    assert tuple(output.extra) == OcrReward.extras
    assert output.extra["exact_match"].tolist() == [1.0] * len(WORDS)
    assert output.extra["edit_similarity"].tolist() == [1.0] * len(WORDS)


def test_score_mixes_similarity_and_exact_match(images):
    # Read are abc, word, flow: one substitution of 3, two surplus characters of 4, an exact match.
    targets = prompts(["abx", "wo", "flow"])
    np.testing.assert_allclose(OcrReward()(images[:3], targets).scores, [1 / 3, 1 / 4, 1])
    np.testing.assert_allclose(OcrReward(exact_weight=0)(images[:3], targets).scores, [2 / 3, 1 / 2, 1])
    np.testing.assert_allclose(OcrReward(exact_weight=1)(images[:3], targets).scores, [0, 0, 1])


def test_readings_do_not_depend_on_the_batch(reward, images):
    readings = reward.read(images)
    assert reward.read(np.concatenate([images] * 8)) == readings * 8
    assert reward.read(images[::-1]) == readings[::-1]
    assert [reward.read(image[None])[0] for image in images] == readings


def test_blank_image_scores_zero(reward):
    blank = np.full((1, 32, 64, 3), 255, dtype=np.uint8)
    assert reward(blank, prompts(["word"])).scores.tolist() == [0.0]


def test_detection_reads_several_lines_of_a_large_image():
    picture = draw_lines(["Hello", "World"])[None]
    target = [Prompt(text='a poster that says "Hello World"', target="Hello World")]
    assert OcrReward(detect=True)(picture, target).scores.tolist() == [1.0]
    assert OcrReward()(picture, target).scores[0] < 0.5


def draw_words(words, angle=0, size=512):
    """Words with the left ends of their middles, and their heights, on a picture that is turned by degrees."""
    canvas = Image.new("RGB", (size, size), "white")
    for word, place, height in words:
        font = ImageFont.load_default(size=height)
        ImageDraw.Draw(canvas).text(place, word, font=font, fill="black", anchor="lm")
    return np.asarray(canvas.rotate(angle, fillcolor="white", resample=Image.Resampling.BICUBIC))


@pytest.mark.parametrize("angle", [-8, -1, 0, 4])
def test_detection_reads_along_a_tilted_line(angle):
    """The detector finds words from the top, which on a line that rises are its last ones."""
    picture = draw_words([("GRAND", (20, 256), 44), ("opening", (300, 262), 44)], angle)
    assert OcrReward(detect=True).read(picture[None]) == ["GRAND opening"]


@pytest.mark.parametrize("angle", [0, 6])
def test_detection_reads_large_and_small_words_line_by_line(angle):
    words = [
        ("sale", (30, 190), 36),
        ("NOW", (260, 180), 72),
        ("until", (60, 330), 44),
        ("Friday", (290, 322), 60),
    ]
    assert OcrReward(detect=True).read(draw_words(words, angle)[None]) == ["sale NOW until Friday"]


def test_detection_finds_nothing_on_a_blank_image():
    assert OcrReward(detect=True).read(np.full((1, 64, 64, 3), 255, dtype=np.uint8)) == [""]


OFFLINE = """
import socket, sys, numpy

def refuse(*arguments):
    raise AssertionError("the OCR engine opened a socket")

socket.socket.connect = refuse
from flowcorr.rewards import OcrReward
for detect in (False, True):
    OcrReward(detect=detect).read(numpy.zeros((1, 32, 64, 3), dtype=numpy.uint8))
"""


def test_engine_starts_without_network_and_without_a_word():
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reward_can_be_pickled_after_use(reward, images):
    reward(images, prompts(WORDS))
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_case_and_white_space_do_not_count():
    exact, similarity = compare(["  New YORK\n"], ["new york"])
    assert exact.tolist() == [1.0]
    assert similarity.tolist() == [1.0]


def test_spellings_of_a_text_match_and_other_texts_do_not():
    same = [
        ("don't", "don\u2019t"),
        ("café", "cafe\u0301"),
        ("1:30", "1\uff1a30"),
        ("ab", "a\u200bb"),
        ("-", "–"),
    ]
    assert compare(*zip(*same, strict=True))[0].all()
    assert compare(*zip(*same, strict=True))[1].tolist() == [1.0] * len(same)
    other = [("O", "0"), ("x2", "x²"), ("cafe", "café"), ("a-b", "ab")]
    assert not compare(*zip(*other, strict=True))[0].any()


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=5))
def test_similarity_is_symmetric_and_one_only_for_equal_texts(pairs):
    readings, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    exact, similarity = compare(readings, targets)
    np.testing.assert_array_equal(similarity, compare(targets, readings)[1])
    assert ((similarity >= 0) & (similarity <= 1)).all()
    np.testing.assert_array_equal(similarity == 1, exact == 1)


@pytest.mark.parametrize("target", [None, "", "  "])
def test_missing_target_names_the_prompt(reward, images, target):
    given_prompts = [*prompts(WORDS[:4]), Prompt(text="a cat", target=target)]
    with pytest.raises(BatchError, match="sample 4 .* target;"):
        reward(images, given_prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact_weight": 1.5}, "exact_weight=1.5"),
        ({"exact_weight": float("nan")}, "exact_weight=nan"),
        ({"exact_weight": "0.5"}, "exact_weight='0.5'"),
        ({"exact_weight": True}, "exact_weight=True"),
        ({"detect": "yes"}, "detect='yes'"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 1.5}, "threads=1.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        OcrReward(**options)


def test_missing_system_library_names_the_packages():
    error = engine_error(ImportError("libGL.so.1: cannot open shared object file: No such file or directory"))
    assert isinstance(error, MissingExtraError)
    for part in ("reward ocr", "libGL.so.1", "opencv-python-headless", "apt-get install libgl1 libglib2.0-0"):
        assert part in str(error)


@pytest.mark.parametrize("package", ["rapidfuzz", "rapidocr", "onnxruntime"])
def test_missing_package_is_said_at_construction(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"^reward ocr .* {package}; .*'flowcorr\[ocr\]'"):
        OcrReward()
