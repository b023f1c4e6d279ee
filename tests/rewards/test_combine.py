import asyncio
import pickle

import numpy as np
import pytest
import torch

from flowcorr.config import RewardTerm, load
from flowcorr.errors import BackendError, ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import RewardOutput, build_reward, known_scores, score_batch, training_scores
from flowcorr.rewards.combine import REWARDS, states

IMAGES = np.array([0, 100, 200], dtype=np.uint8)[:, None, None, None] * np.ones((3, 8, 8, 3), dtype=np.uint8)
PROMPTS = [Prompt(text=text) for text in ("a", "bb", "ccc")]

USER_MODULE = """
import time
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

class Stated(Length):
    extras = ("odd",)

class Extra:
    def __init__(self, key):
        self.key = key
    def __call__(self, images, prompts):
        scores = np.zeros(len(prompts))
        return RewardOutput(scores=scores, extra={self.key: scores + 777})

def mean(images, prompts):
    return [0.0] * len(prompts)

def no_arguments():
    return []

def infinite_at_bb(images, prompts):
    return [float("inf") if prompt.text == "bb" else 1.0 for prompt in prompts]

def fails_at_bb(images, prompts):
    if any(prompt.text == "bb" for prompt in prompts):
        raise ValueError("no bb")
    return [1.0] * len(prompts)

def exits(images, prompts, error=SystemExit):
    raise error(0)

def slow(images, prompts):
    time.sleep(0.3)
    return [1.0] * len(prompts)

def blackens(images, prompts):
    images[:] = 0
    return [1.0] * len(prompts)

def pops(images, prompts):
    return [prompt.metadata.pop("level", 0) for prompt in prompts]

def nan_at_bb(images, prompts):
    return [float("nan") if prompt.text == "bb" else 1.0 for prompt in prompts]
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_rewards.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def term(name, weight=1.0, *, tags=(), **options):
    return RewardTerm(name=name, weight=weight, tags=tags, options=options)


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


def test_a_term_that_writes_into_its_images_changes_no_others():
    reward = build_reward([term("users_rewards:blackens"), term("users_rewards:brightness")])
    images = IMAGES.copy()
    output = reward(images, PROMPTS)
    np.testing.assert_array_equal(output.terms["brightness"], [0, 100, 200])
    np.testing.assert_array_equal(images, IMAGES)


def test_a_term_that_writes_into_metadata_changes_them_for_no_later_call():
    reward = build_reward([term("users_rewards:pops")])
    prompts = [Prompt(text=f"prompt {level}", metadata={"level": level}) for level in (1, 2, 3)]
    for _ in range(2):
        assert reward(IMAGES, prompts).scores.tolist() == [1, 2, 3]


def test_reward_can_be_pickled():
    reward = build_reward([term("jpeg_compressibility", 2), term("users_rewards:brightness", scale=2)])
    copy = pickle.loads(pickle.dumps(reward))
    np.testing.assert_array_equal(copy(IMAGES, PROMPTS).scores, reward(IMAGES, PROMPTS).scores)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("fails_at_bb", r"ValueError: no bb \(from reward fails_at_bb\)"),
        ("nan_at_bb", r"\(jpeg_compressibility=-\d.*, nan_at_bb=nan\)"),
    ],
)
def test_the_term_that_fails_is_named(name, named):
    reward = build_reward([term("jpeg_compressibility"), term(f"users_rewards:{name}")])
    with pytest.raises(BackendError, match=f"sample 1 .*'bb'.*{named}"):
        score_batch(reward, IMAGES, PROMPTS)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_term_cannot_end_the_process_in_silence(error):
    reward = build_reward([term("users_rewards:exits", error=error), term("jpeg_compressibility")])
    with pytest.raises(BackendError, match=rf"^reward exits .*{error.__name__}\(0\)"):
        score_batch(reward, IMAGES, PROMPTS, on_error="drop_group")


def test_the_log_names_the_reward_that_is_waited_for(caplog):
    reward = build_reward([term("jpeg_compressibility"), term("users_rewards:slow")], timeout=0.02)
    assert reward(IMAGES, PROMPTS).terms["slow"].tolist() == [1.0] * 3
    assert "reward slow" in caplog.text
    caplog.clear()
    build_reward([term("users_rewards:slow")], timeout=60)(IMAGES, PROMPTS)
    build_reward([term("users_rewards:slow")])(IMAGES, PROMPTS)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        (
            [term("jpeg_compresibility")],
            r"reward\.terms\.name='jpeg_compresibility' .*jpeg_compressibility\?",
        ),
        ([term("jpeg_compressibility", quality=3)], "jpeg_compressibility .*'quality'; .* none$"),
        ([term("ocr", detec=True)], "ocr .*'detec'; .* exact_weight, detect, threads$"),
        ([term("http")], "http .*'url'; .* url, format, "),
        ([term("users_rewards:brightness", scal=1)], "users_rewards:brightness .*'scal'"),
        ([term("users_rewards:Length", off=1)], "users_rewards:Length .*'off'; .* offset$"),
        ([term("users_rewards:no_arguments")], r"users_rewards:no_arguments .*\(images, prompts\): "),
        ([term("users_rewards:not_callable")], "users_rewards:not_callable: .* int "),
        ([term("users_rewards:missing")], "users_rewards has no 'missing'"),
        ([term("users_rewards:")], "users_rewards has no ''"),
        ([term("users_reward:brightness")], "no module 'users_reward'"),
        (
            [term("jpeg_compressibility"), term("jpeg_compressibility", 2.0)],
            r"reward\.terms .* 'jpeg_compressibility'; .*once",
        ),
        (
            [term("users_rewards:mean"), term("jpeg_compressibility")],
            r"reward\.terms .*'mean', .* reward/mean,",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_terms_are_refused(terms, named):
    with pytest.raises(ConfigError, match=named):
        build_reward(terms)


@pytest.mark.parametrize("name", ["reward", "reward_std", "mean", "failed_samples"])
def test_an_extra_cannot_replace_a_metric_of_every_run(name):
    reward = build_reward([term("users_rewards:Extra", key=name)])
    with pytest.raises(ConfigError, match=f"^reward Extra .* reward/{name}, "):
        score_batch(reward, IMAGES, PROMPTS)


def test_an_extra_cannot_replace_another_score():
    reward = build_reward([term("users_rewards:Extra", key="x")], gold=[term("users_rewards:Extra", key="x")])
    assert sorted(reward(IMAGES, PROMPTS).extra) == ["gold/Extra", "gold/Extra_x", "x"]
    reward = build_reward([term("users_rewards:Extra", key="gold/mean")], gold=[term("users_rewards:mean")])
    with pytest.raises(ConfigError, match=" reward/gold/mean, another"):
        reward(IMAGES, PROMPTS)


def test_a_lone_term_may_have_any_name():
    assert build_reward([term("users_rewards:mean")])(IMAGES, PROMPTS).extra == {}


def test_gold_is_logged_and_never_optimised():
    terms = [term("users_rewards:Length", 3)]
    alone = build_reward(terms)(IMAGES, PROMPTS)
    watched = build_reward(
        terms, gold=[term("users_rewards:brightness"), term("users_rewards:Length", offset=2)]
    )(IMAGES, PROMPTS)
    np.testing.assert_array_equal(watched.scores, alone.scores)
    assert list(watched.extra) == ["odd", "gold/brightness", "gold/Length", "gold/Length_odd"]
    np.testing.assert_array_equal(watched.extra["odd"], alone.extra["odd"])
    np.testing.assert_allclose(watched.extra["gold/brightness"], [0, 100, 200])
    np.testing.assert_array_equal(watched.extra["gold/Length"], [3, 4, 5])
    assert list(watched.terms) == ["Length"]


@pytest.mark.parametrize("name", ["nan_at_bb", "infinite_at_bb", "fails_at_bb"])
def test_gold_that_cannot_score_a_sample_fails_it(name):
    reward = build_reward([term("jpeg_compressibility")], gold=[term(f"users_rewards:{name}")])
    with pytest.raises(BackendError, match=rf"sample 1 .*'bb'.*gold/{name}\b"):
        score_batch(reward, IMAGES, PROMPTS)
    output = score_batch(reward, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False]
    np.testing.assert_array_equal(output.extra[f"gold/{name}"], [1, np.nan, 1])


def test_reason_of_a_term_is_passed_on_with_its_name(monkeypatch):
    import users_rewards

    def unsure(images, prompts):
        return RewardOutput(scores=np.array([1.0, np.nan, 1.0]), errors={1: reason})

    reason = "too dark"
    monkeypatch.setattr(users_rewards, "brightness", unsure)
    reward = build_reward([term("jpeg_compressibility"), term("users_rewards:brightness")])
    with pytest.raises(BackendError, match=f"sample 1 .*: brightness: {reason};"):
        score_batch(reward, IMAGES, PROMPTS)


TAGGED = [Prompt(text=text, tag=tag) for text, tag in (("a", "text"), ("bb", "count"), ("ccc", "text"))]


def test_a_term_scores_the_prompts_that_have_its_tags():
    own = term("users_rewards:Length", 2, tags=("text", "colour"))
    output = score_batch(build_reward([own, term("users_rewards:brightness")]), IMAGES, TAGGED)
    assert not output.failed.any()
    assert output.scores.tolist() == [0 + 2 * 1, 100, 200 + 2 * 3]
    np.testing.assert_array_equal(output.extra["Length"], [1, np.nan, 3])
    np.testing.assert_array_equal(output.extra["Length_odd"], [1, np.nan, 1])
    np.testing.assert_array_equal(output.terms["brightness"], [0, 100, 200])


def test_a_term_whose_tags_no_prompt_of_a_batch_has_is_not_called():
    reward = build_reward([term("users_rewards:exits", tags=("colour",)), term("users_rewards:brightness")])
    output = reward(IMAGES, TAGGED)
    assert output.scores.tolist() == [0, 100, 200]
    assert np.isnan(output.terms["exits"]).all()


def test_a_failure_of_a_term_with_tags_is_that_of_its_sample(monkeypatch):
    import users_rewards

    prompts = [TAGGED[1], TAGGED[0], Prompt(text="bb", tag="text")]
    reward = build_reward([term("users_rewards:nan_at_bb", tags=("text",)), term("users_rewards:brightness")])
    output = score_batch(reward, IMAGES, prompts, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True]

    def unsure(images, prompts):
        return RewardOutput(scores=np.array([1.0, np.nan]), errors={1: reason})

    reason = "too dark"
    monkeypatch.setattr(users_rewards, "brightness", unsure)
    reward = build_reward([term("users_rewards:brightness", tags=("text",)), term("jpeg_compressibility")])
    with pytest.raises(BackendError, match=f"sample 2 .*: brightness: {reason};"):
        score_batch(reward, IMAGES, prompts)


def test_names_of_scores_are_known_before_a_reward_is_built():
    jpeg, ocr = term("jpeg_compressibility"), term("ocr")
    assert known_scores([jpeg], own=False) == set()
    assert known_scores([ocr], own=False) == {"exact_match", "edit_similarity"}
    assert known_scores([jpeg, ocr], own=False) == {
        jpeg.name,
        "ocr",
        "ocr_exact_match",
        "ocr_edit_similarity",
    }
    assert known_scores([jpeg], [term("pickscore")], own=False) == {"gold/pickscore", "gold/pickscore_logit"}
    # As the reward itself names them.
    both = build_reward([jpeg], [term("jpeg_incompressibility")])(IMAGES, PROMPTS)
    assert known_scores([jpeg], [term("jpeg_incompressibility")], own=False) == set(both.extra)


@pytest.mark.parametrize("own", [False, True])
def test_names_that_a_server_chooses_are_unknown(own):
    assert known_scores([term("ocr"), term("http")], own=own) is None


def test_an_own_reward_states_the_names_of_its_scores():
    own = [term("users_rewards:mean"), term("users_rewards:Stated")]
    assert known_scores(own, own=True) == {"mean", "Stated", "Stated_odd"}
    assert known_scores(own[1:], own=True) == {"odd"}
    assert known_scores(own, own=False) is None


def test_a_reward_states_where_it_computes():
    stated = {name: states(term(name), "computes_on_gpu") for name in REWARDS}
    assert {name for name, on_gpu in stated.items() if on_gpu} == {
        "pickscore",
        "aesthetic",
        "reference_similarity",
    }
    assert not any(states(term(name), "overlaps") for name in ("pickscore", "aesthetic", "my_rewards:mine"))
    assert all(states(term(name), "overlaps") for name, on_gpu in stated.items() if not on_gpu)


RECIPE = """
algorithm: {advantage_std: global}
reward:
  terms:
    - {name: jpeg_compressibility, weight: 0.5, normalize: group}
    - {name: users_rewards:Length, normalize: group, options: {offset: 1}}
  gold:
    - {name: users_rewards:brightness}
"""


def test_recipe_with_normalised_terms_and_gold(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    config = load(path).reward
    assert [(term.name, term.weight, term.normalize) for term in config.terms] == [
        ("jpeg_compressibility", 0.5, "group"),
        ("users_rewards:Length", 1.0, "group"),
    ]
    output = score_batch(build_reward(config.terms, config.gold), IMAGES, PROMPTS)
    assert not output.failed.any()
    assert list(output.extra) == ["jpeg_compressibility", "Length", "Length_odd", "gold/brightness"]
    scores = training_scores(output, config.terms, torch.tensor([0, 0, 0]))
    np.testing.assert_allclose(scores.sum(), 0, atol=1e-9)


def test_gold_names_are_given_once():
    with pytest.raises(ConfigError, match=r"reward\.gold .* 'jpeg_compressibility'; .*once"):
        build_reward([term("jpeg_compressibility")], gold=[term("jpeg_compressibility")] * 2)


@pytest.mark.parametrize("name", ["jpeg_compressibility", "http"])
def test_unknown_options_are_named_and_their_values_are_not(name):
    options = {"api_key": "s3cret", "url": "https://host/s3cret", "extra": ["s3cret"]}
    with pytest.raises(ConfigError, match=f" {name} .* api_key, url, extra: ") as caught:
        build_reward([RewardTerm(name=name, options=options)])
    assert "s3cret" not in str(caught.value)
