import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from flowcorr.errors import BackendError, ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward, score_batch

IMAGES = np.array([0, 100, 200], dtype=np.uint8)[:, None, None, None] * np.ones((3, 8, 8, 3), dtype=np.uint8)
PROMPTS = [Prompt(text=text) for text in ("a", "bb", "ccc")]

USER_MODULE = """
import numpy as np
from flowcorr.rewards import RewardOutput

not_callable = 3

def brightness(images, prompts, scale=1.0):
    return images.mean(axis=(1, 2, 3)) * scale

class Length:
    def __init__(self, offset=0):
        self.offset = offset
    def __call__(self, images, prompts):
        lengths = np.array([len(prompt.text) + self.offset for prompt in prompts], dtype=float)
        return RewardOutput(scores=lengths, extra={"odd": lengths % 2})

def no_arguments():
    return []

def fails_at_bb(images, prompts):
    if any(prompt.text == "bb" for prompt in prompts):
        raise ValueError("no bb")
    return [1.0] * len(prompts)

def nan_at_bb(images, prompts):
    return [float("nan") if prompt.text == "bb" else 1.0 for prompt in prompts]
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_rewards.py").write_text(USER_MODULE)
    (tmp_path / "users_broken_rewards.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)


def term(name, weight=1.0, **options):
    return SimpleNamespace(name=name, weight=weight, options=options)


def test_weighted_sum_of_a_function_and_a_class():
    reward = build_reward(
        [term("users_rewards:brightness", 0.5, scale=0.1), term("users_rewards:Length", -2, offset=1)]
    )
    output = reward(IMAGES, PROMPTS)
    np.testing.assert_allclose(output.scores, [0 - 4, 5 - 6, 10 - 8])
    assert sorted(output.extra) == ["Length", "Length_odd", "brightness"]
    np.testing.assert_allclose(output.extra["brightness"], [0, 10, 20])
    np.testing.assert_array_equal(output.extra["Length_odd"], [0, 1, 0])


def test_one_term_keeps_the_names_of_its_extras():
    output = build_reward([term("users_rewards:Length", 3)])(IMAGES, PROMPTS)
    assert output.scores.tolist() == [3.0, 6.0, 9.0]
    assert list(output.extra) == ["odd"]
    assert output.extra["odd"].tolist() == [1.0, 0.0, 1.0]


def test_opposite_jpeg_terms_cancel():
    reward = build_reward([term("jpeg_compressibility"), term("jpeg_incompressibility")])
    assert reward(IMAGES, PROMPTS).scores.tolist() == [0.0, 0.0, 0.0]


def test_reward_can_be_pickled():
    reward = build_reward([term("jpeg_compressibility", 2), term("users_rewards:brightness", scale=2)])
    copy = pickle.loads(pickle.dumps(reward))
    np.testing.assert_array_equal(copy(IMAGES, PROMPTS).scores, reward(IMAGES, PROMPTS).scores)


def test_failing_term_is_named():
    reward = build_reward([term("jpeg_compressibility"), term("users_rewards:fails_at_bb")])
    with pytest.raises(BackendError, match=r"sample 1 \(prompt 'bb'\).*no bb \(from reward fails_at_bb\)"):
        score_batch(reward, IMAGES, PROMPTS)


def test_non_finite_term_is_named():
    reward = build_reward([term("jpeg_compressibility"), term("users_rewards:nan_at_bb")])
    with pytest.raises(BackendError, match=r"sample 1 \(prompt 'bb'\).*nan_at_bb=nan"):
        score_batch(reward, IMAGES, PROMPTS)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([term("jpeg_compresibility")], "did you mean jpeg_compressibility"),
        ([term("jpeg_compressibility", quality=3)], "unexpected keyword argument 'quality'; it takes none"),
        ([term("ocr", detec=True)], "'detec'; it takes exact_weight, detect, threads"),
        ([term("users_rewards:brightness", scal=1)], "'scal'"),
        ([term("users_rewards:Length", off=1)], "'off'; it takes offset"),
        ([term("users_rewards:no_arguments")], r"cannot be called as \(images, prompts\)"),
        ([term("users_rewards:not_callable")], "of type int"),
        ([term("users_rewards:missing")], "users_rewards has no 'missing'"),
        ([term("users_rewards:")], "has no ''"),
        ([term("users_reward:brightness")], "no module 'users_reward'"),
        ([term("jpeg_compressibility"), term("jpeg_compressibility", 2.0)], "more than once|several terms"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_terms_are_refused(terms, message):
    with pytest.raises(ConfigError, match=message):
        build_reward(terms)


def test_error_inside_the_users_module_is_shown_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        build_reward([term("users_broken_rewards:anything")])
