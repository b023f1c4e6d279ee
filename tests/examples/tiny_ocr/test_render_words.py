import numpy as np
from render_words import HEIGHT, WIDTH, render


def test_render_is_black_on_white_and_repeatable():
    images = render(["abc", "wxyz"], rng=np.random.default_rng(0))

    assert images.shape == (2, HEIGHT, WIDTH, 3)
    assert images.dtype == np.uint8
    assert images.min() == 0
    assert images.max() == 255
    np.testing.assert_array_equal(images, render(["abc", "wxyz"], rng=np.random.default_rng(0)))


def test_four_of_the_widest_letters_stay_inside():
    images = render(["mmmm", "wwww"] * 8, rng=np.random.default_rng(0))

    assert (images[:, :, -1] == 255).all()
    assert (images[:, :, 0] == 255).all()


def test_struck_words_have_two_lines_from_edge_to_edge_which_may_touch():
    struck = render(["abcd"] * 20, rng=np.random.default_rng(0), struck_share=1.0)
    clean = render(["abcd"] * 20, rng=np.random.default_rng(0))

    dark_rows = (struck == 0).all(axis=(2, 3))
    starts = (np.diff(dark_rows.astype(int), axis=1, prepend=0) == 1).sum(axis=1)
    assert set(starts) == {1, 2}
    assert ((dark_rows.sum(axis=1) > 6) & (dark_rows.sum(axis=1) <= 12)).all()
    assert not (clean == 0).all(axis=(2, 3)).any()


def test_struck_share_is_a_probability():
    images = render(["abc"] * 400, rng=np.random.default_rng(0), struck_share=0.6)

    share = (images == 0).all(axis=(2, 3)).any(axis=1).mean()
    assert abs(share - 0.6) < 0.08
