"""Words are read line by line, along lines of any tilt and bend."""

import numpy as np
import pytest

from flowcorr.rewards.reading_order import reading_order

WIDTH = 1024


def box(left, top, width, height, angle=0.0):
    """The corners of a level box, turned around its middle by degrees, clockwise as on a screen."""
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - [width / 2, height / 2]
    return corners @ turn(angle).T + [left + width / 2, top + height / 2]


def turn(angle):
    cosine, sine = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    return np.array([[cosine, -sine], [sine, cosine]])


def turned(boxes, angle):
    """All boxes, turned around the middle of the picture."""
    middle = [WIDTH / 2, WIDTH / 2]
    return (np.array(boxes) - middle) @ turn(angle).T + middle


def assert_read_in_order(boxes):
    """Whatever the order in which a detector gives them."""
    for seed in range(3):
        places = np.random.default_rng(seed).permutation(len(boxes))
        assert [int(places[place]) for place in reading_order(np.array(boxes)[places])] == list(
            range(len(boxes))
        )


def paragraph(seed):
    """Lines of words of several heights on common baselines, whose boxes have the margins that detectors add."""
    draw = np.random.default_rng(seed)
    boxes, top = [], 150.0
    for _ in range(draw.integers(1, 5)):
        height = draw.uniform(40, 70)
        left = draw.uniform(40, 200)
        base = top + 1.6 * height
        for _ in range(draw.integers(1, 4)):
            own = height * draw.choice([0.8, 1.0, 1.6])
            width = own * draw.uniform(1.2, 3)
            boxes.append(box(left - 0.1 * own, base - 1.1 * own, width + 0.2 * own, 1.2 * own))
            left += width + draw.uniform(0.15, 2) * height
        top = base + 0.3 * height
    return boxes


@pytest.mark.parametrize("angle", [-15, -8, -4, -1, 0, 1, 4, 8, 15])
def test_lines_of_words_of_several_heights(angle):
    for seed in range(20):
        assert_read_in_order(turned(paragraph(seed), angle))


@pytest.mark.parametrize("error", [-2.5, 2.5])
@pytest.mark.parametrize("angle", [-6, 0, 6])
def test_the_angle_of_each_box_is_known_but_roughly(angle, error):
    """Two words far apart on one line, of boxes whose angles are off by up to 2.5 degrees, as detected ones are."""
    words = turned([box(40, 480, 230, 60), box(720, 480, 260, 60)], angle)
    middles = words.mean(1, keepdims=True)
    assert_read_in_order((words - middles) @ turn(error).T + middles)


@pytest.mark.parametrize("bend", [-1, 1])
def test_words_on_an_arc(bend):
    """Of a circle of 500 pixels, from above or from below, with a word on the inner side."""
    middle, words = np.array([512.0, 512.0]), []
    for degrees in (-50, -22, 0, 25, 52):
        at = middle + 500 * np.array([np.sin(np.radians(degrees)), -bend * np.cos(np.radians(degrees))])
        words.append(box(at[0] - 80, at[1] - 30, 160, 60, bend * degrees))
    inside = box(432, 482, 160, 60)
    assert_read_in_order([*words, inside] if bend == 1 else [inside, *words])


def test_a_tall_word_beside_two_lines():
    tall = box(40, 400, 400, 200)
    assert_read_in_order([tall, box(430, 395, 300, 95), box(430, 495, 250, 95)])
    assert_read_in_order([box(40, 395, 300, 95), box(40, 495, 250, 95), box(345, 400, 400, 200)])


def test_columns_with_lines_at_other_heights_are_read_one_after_the_other():
    left = [box(40, 100 + 100 * line, 300, 95) for line in range(4)]
    right = [box(600, 150 + 100 * line, 300, 95) for line in range(4)]
    assert_read_in_order([*left, *right])


def test_columns_with_lines_at_equal_heights_are_read_across():
    assert_read_in_order([box(left, 100 + 100 * line, 300, 50) for line in range(4) for left in (40, 600)])


def test_letters_below_each_other():
    assert_read_in_order([box(500, 60 + 90 * letter, 40 if letter != 2 else 12, 70) for letter in range(5)])


def test_a_box_alone_and_none():
    assert reading_order(np.zeros((0, 4, 2))) == []
    assert reading_order(np.array([box(10, 10, 5, 30)])) == [0]
    assert reading_order(np.zeros((2, 4, 2))) in ([0, 1], [1, 0])  # of no size
