"""The study's statistics against numbers worked out by hand, its hooks on real parts, and the whole of it, tiny."""

import csv
import importlib
import itertools
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowcorr import config
from flowcorr.trainer.setup import build_run
from tests.rollouts import make_rollout

STUDY = Path(__file__).parents[2] / "examples" / "mismatch_study"
MODULES = ("arms", "analysis", "hooks", "run")
SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.n=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "data.num_train=8",
)


@pytest.fixture
def study(monkeypatch):
    """The study's modules, imported as its command does."""
    monkeypatch.syspath_prepend(str(STUDY))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name)


def test_holm_against_an_example_by_hand(study):
    # Sorted .005 .01 .03 .04 times 4 3 2 1 is .02 .03 .06 .04, and none may be below the one before.
    assert study.analysis.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert study.analysis.holm([0.6, 0.4]) == pytest.approx([0.8, 0.8])
    assert study.analysis.holm([0.9, 0.9, 0.9]) == [1.0, 1.0, 1.0]
    assert study.analysis.holm([]) == []


def test_paired_t_against_an_example_by_hand(study):
    # Differences 1 2 3 4: mean 2.5, std sqrt(5/3), error .6455, t = 3.873 on 3 degrees; the table has t = 3.182.
    mean, half_width, p = study.analysis.paired_t([1, 2, 3, 4])
    assert mean == 2.5
    assert half_width == pytest.approx(3.18245 * math.sqrt(5 / 12), rel=1e-5)
    assert p == pytest.approx(0.030466, rel=1e-4)
    assert study.analysis.paired_t([0.1, 0.1]) == (0.1, 0.0, 0.0)
    assert study.analysis.paired_t([0.0, 0.0]) == (0.0, 0.0, 1.0)
    assert study.analysis.paired_t([0.5])[0] == 0.5
    assert math.isnan(study.analysis.paired_t([0.5])[1])


@pytest.mark.parametrize(
    ("dof", "critical"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (30, 2.04227)],
)
def test_t_against_its_table(study, dof, critical):
    assert study.analysis.t_quantile(0.05, dof) == pytest.approx(critical, rel=1e-5)


def rows(arm, exact, *, old_log_prob, seeds=(0, 1, 2)):
    """Runs of 8 steps at 10 s a step and `old_log_prob` s more, with `exact` half way and at the end by seed."""
    return [
        {
            "arm": arm,
            "seed": str(seed),
            "step": str(step),
            "exact_match": str(exact[place][seed]),
            "cpu_total": str(100 * (place + 1)),
            **{f"cpu_{name}": str(2.5 * step) for name in ("rollout", "reward", "correction", "update")},
            "cpu_old_log_prob": str(old_log_prob * step),
            **dict.fromkeys(("gap", "clip_noise", "clipped", "rejected", "ess"), "0.5"),
        }
        for seed in seeds
        for place, step in enumerate((4, 8))
    ]


HARM = "int4/two/uncorrected against fp32/two/uncorrected"
BYPASS = "int4/two/bypass against int4/two/uncorrected"


@pytest.fixture
def results(study):
    """Bypass, at 10 s a step, is as good as uncorrected at 12.5 s after as many steps."""
    plain = rows("int4/two/uncorrected", ([0.2, 0.3, 0.4], [0.6, 0.7, 0.8]), old_log_prob=2.5)
    bypass = rows("int4/two/bypass", ([0.3, 0.3, 0.3], [0.6, 0.7, 0.8]), old_log_prob=0)
    return [*plain, *bypass, *rows("fp32/two/uncorrected", ([0] * 3, [0.6, 0.8, 0.95]), old_log_prob=2.5)]


def test_comparisons_at_equal_steps_and_at_equal_time(study, results):
    found = study.analysis.Study(results)
    steps = {one.label: one for one in found.equal_steps()}
    assert steps.keys() == {HARM, BYPASS}
    harm = steps[HARM]
    assert harm.differences == pytest.approx((0.0, -0.1, -0.15))
    assert harm.adjusted == pytest.approx(2 * harm.p)
    assert steps[BYPASS].p == 1

    # Bypass ends at 80 s, when uncorrected has done 6.4 steps: 0.4 of the first evaluation, 0.6 of the second.
    (saved,) = found.equal_time()
    assert str(saved.arm) == "int4/two/bypass"
    assert saved.differences == pytest.approx((0.16, 0.16, 0.16))
    assert found.cpu_hours == pytest.approx(9 * 200 / 3600)


def test_words_name_what_is_sure_and_what_is_not(study, results):
    text = study.analysis.table(study.analysis.Study([]), study.analysis.Study(results))
    (sure,) = [line for line in text.splitlines() if line.startswith(f"- {BYPASS}, at ")]
    assert "+0.160 ± 0.000" in sure
    assert "steps: " not in text  # at equal steps, nothing is sure


def test_the_tables_follow_from_the_results(study, tmp_path):
    folder = Path(study.run.__file__).parent / "results"
    rows = {name: study.run.read(folder / f"{name}.csv") for name in study.run.PHASE_NAMES}
    study.analysis.analyse(rows, tmp_path)
    written = sorted(path.name for path in tmp_path.glob("*.md"))
    assert written == sorted({path.name for path in folder.glob("*.md")} - {"README.md"})
    for name in written:
        assert (tmp_path / name).read_text(encoding="utf-8") == (folder / name).read_text(encoding="utf-8")


def test_arms_are_known_distinct_and_load(study):
    arms = study.arms.screened()
    assert len(set(arms)) == len(arms)
    for arm in arms:
        assert study.arms.Arm.parse(str(arm)) == arm
        assert set(arm.references[:1]) <= set(arms)
        settings = config.load(study.run.RECIPE, arm.overrides())
        assert settings.algorithm.rollout_correction.mode != "off"
    confirmed = study.run.confirm()
    assert set(confirmed.arms) <= set(arms)
    corrected = [arm for arm in confirmed.arms if arm.correction != "uncorrected"]
    assert all(set(arm.references[:1]) <= set(confirmed.arms) for arm in corrected)
    assert len(confirmed.arms) <= 12
    with pytest.raises(ValueError, match="'fp4' is unknown; choose from fp32, "):
        study.arms.Arm.parse("fp4/two/bypass")


def followed(study, scores):
    """The phase after `samples`, if its arms had these scores."""
    scored = [
        {"arm": str(arm), "seed": "0", "step": "1", "exact_match": str(score)}
        for arm, score in zip(study.run.samples().arms, scores, strict=True)
    ]
    return study.run.samples_again(scored)


def test_no_phase_repeats_the_seeds_of_another(study):
    """But for the two that are compared with an earlier one, seed by seed."""
    seeds = {"samples_again": {*followed(study, (0, 0, 0)).seeds}} | {
        name: {*getattr(study.run, name)().seeds} for name in study.run.PHASE_NAMES if name != "samples_again"
    }
    pairs = itertools.combinations(study.run.PHASE_NAMES, 2)
    shared = [(one, other) for one, other in pairs if seeds[one] & seeds[other]]
    assert shared == [("confirm", "bypass"), ("longer", "exchanged")]


def test_step_means_by_hand(study):
    weights = torch.tensor([[1.0, 4.0], [3.0, 6.0], [5.0, 8.0]])
    steps = torch.tensor([[0, 1], [0, 1], [1, 3]])
    expected = torch.tensor([[2.0, 5.0], [2.0, 5.0], [5.0, 8.0]])
    assert torch.equal(study.hooks.step_means(weights, steps), expected)


def test_the_control_is_the_actor_but_for_the_weights_of_its_update(study):
    inner = SimpleNamespace(
        weights=SimpleNamespace(version=3),
        update=lambda batch, correction, **settings: (batch.rollout_is_weights, settings),
    )
    actor = study.hooks.StepMeanWeights(inner)
    weights, steps = torch.tensor([[1.0, 4.0], [3.0, 6.0]]), torch.tensor([[0, 1], [0, 1]])
    batch = study.hooks.ActorBatch(
        rollout=make_rollout(2, step_indices=steps), advantages=torch.zeros(2), rollout_is_weights=weights
    )
    seen, settings = actor.update(batch, None, training_step=1)
    assert torch.equal(seen, torch.tensor([[2.0, 5.0], [2.0, 5.0]]))
    assert settings == {"training_step": 1}
    assert actor.weights.version == 3


def test_wrong_prompts_are_sampled_as_such_and_scored_as_if_right(study):
    run, _ = build_run(config.load(study.run.RECIPE, [*SMALL, "data.num_heldout=2", "rollout.emulate=none"]))
    run.engine.sync(run.actor.weights.snapshot())
    engine = study.hooks.WrongPrompts(run.engine, share=0.3, seed=0)
    conditioning = run.cache(run.prompts.next(2))
    sampling = {"training_step": 1, "with_means": True}
    plain, drawn = (one.sample(conditioning, range(2), **sampling) for one in (run.engine, engine))
    is_wrong = engine.is_wrong(8, 1)
    assert 0 < is_wrong.sum() < 8
    same = (drawn.images == plain.images).flatten(1).all(1)
    assert torch.equal(same, ~is_wrong)
    for name, rows_of_prompt in drawn.conditioning.items():
        assert torch.equal(rows_of_prompt, plain.conditioning[name])
    gap = (run.actor.log_probs(drawn).log_probs - drawn.log_probs).abs().amax(1)
    assert torch.equal(gap > 1e-5, is_wrong)


@pytest.mark.parametrize("fault", ["quarter_adapter", "quarter_sigma"])
def test_one_of_four_workers_has_a_gap_of_its_own(study, fault):
    keys = ["rollout.prompts_per_step=4", "data.num_heldout=2", "rollout.emulate=none"]
    run, _ = build_run(config.load(study.run.RECIPE, [*SMALL[1:], *keys]))
    with torch.no_grad():
        for name, parameter in run.actor.weights.parameters.items():
            parameter.add_(0.1 * ("lora_B" in name))
    run.engine.sync(run.actor.weights.snapshot())
    before = run.actor.weights.snapshot().tensors
    engine = study.hooks.OneOfFour(run.engine, run.actor.weights, fault)
    conditioning = run.cache(run.prompts.next(4))
    drawn = engine.sample(conditioning, range(4), training_step=1, with_means=True)
    gap = (run.actor.log_probs(drawn).log_probs - drawn.log_probs).abs().amax(1)
    assert torch.equal(gap > 1e-5, drawn.group_ids == 3)
    after = run.actor.weights.snapshot().tensors
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_random_rejection_takes_its_share(study):
    inner = SimpleNamespace(update=lambda batch, correction, **settings: batch.keep)
    actor = study.hooks.RandomRejection(inner, share=0.3, seed=1)
    batch = study.hooks.ActorBatch(rollout=make_rollout(2000), advantages=torch.zeros(2000))
    first, second = (actor.update(batch, None, training_step=step) for step in (1, 2))
    assert (~first).float().mean() == pytest.approx(0.3, abs=0.03)
    assert not torch.equal(first, second)
    assert torch.equal(first, actor.update(batch, None, training_step=1))


def test_the_arms_of_score_centering_load(study):
    phase = study.run.centering()
    (centred,) = [arm for arm in phase.arms if arm.correction == "score_centering"]
    assert set(centred.references) < set(phase.arms)
    loaded = {arm: config.load(study.run.RECIPE, arm.overrides()) for arm in phase.arms}
    sections = {arm: found.algorithm.rollout_correction for arm, found in loaded.items()}
    assert [arm for arm, section in sections.items() if section.score_centering] == [centred]
    assert sections[centred].mode == "decoupled"


def test_arms_in_bypass_mode_load_and_each_control_follows_its_band(study, tmp_path):
    phase, again = study.run.bypass(), study.run.bypass_again()
    assert set(again.arms) < set(phase.arms)
    for arm in phase.arms:
        assert study.arms.Arm.parse(str(arm)) == arm
        assert config.load(study.run.RECIPE, arm.overrides()).algorithm.rollout_correction.mode == "bypass"
        assert set(arm.references) <= set(phase.arms) or arm.correction != "bypass_auto"
    chosen = [arm for arm in phase.arms if arm.rollout == "quarter_sigma" and arm.correction != "bypass"]
    small = replace(
        phase, arms=tuple(reversed(chosen)), seeds=(10,), words=4, steps={"two": 1}, overrides=SMALL
    )
    study.run.do(small, tmp_path, 1)
    rows = study.run.read(tmp_path / "bypass.csv")
    assert [row["arm"] for row in rows] == [str(arm) for arm in chosen]
    assert study.run.rejected_share(rows, chosen[1], 10) == float(rows[0]["rejected"]) == 0
    none = {name: [] for name in study.run.PHASE_NAMES}
    found = study.analysis.analyse(none | {"bypass": rows, "bypass_again": rows}, tmp_path)
    assert sum(line.startswith("## ") for line in found.splitlines()) >= 2
    assert {"bypass.md", "bypass_again.md"} <= {path.name for path in tmp_path.iterdir()}


def test_what_is_learned_from_is_compared_in_equal_cpu_time(study, tmp_path):
    phase = study.run.samples()
    rollouts = [config.load(study.run.RECIPE, arm.overrides()).rollout for arm in phase.arms]
    assert [(one.n, one.learned_per_prompt) for one in rollouts] == [(12, 12), (24, 12), (24, 24)]
    one, chosen, many = phase.arms
    assert (one.references, chosen.references, many.references) == ([], [one, many], [one])
    again = followed(study, (0.9, 0.5, 0.6))
    assert again.arms == (one, many)
    assert [phase.evaluations(arm) for arm in phase.arms] == [[18, 36], [10, 20], [9, 18]]

    few = tuple(key for key in SMALL if not key.startswith("rollout.n="))
    small = replace(phase, seeds=(72, 73), words=4, steps=dict.fromkeys(phase.steps, 1), overrides=few)
    study.run.do(small, tmp_path, 1)
    rows = study.run.read(tmp_path / "samples.csv")
    none = {name: [] for name in study.run.PHASE_NAMES}
    text = study.analysis.analyse(none | {"samples": rows}, tmp_path)
    assert [row["arm"] for row in rows] == 2 * [str(arm) for arm in phase.arms]
    for left, right in ((chosen, one), (chosen, many), (many, one)):
        assert f"- {left} against {right}, 2 seeds: " in text
    assert (tmp_path / "samples.md").read_text(encoding="utf-8") in text


def test_an_unquantized_engine_is_exact_for_the_adapter_and_apart_from_the_quantized_trainer(study):
    keys = [*SMALL, "data.num_heldout=2", "rollout.emulate=none"]
    run, _ = build_run(config.load(study.run.RECIPE, [*keys, "model.quantization=int8"]))
    with torch.no_grad():
        for name, parameter in run.actor.weights.parameters.items():
            parameter.add_(0.1 * ("lora_B" in name))
    engine = study.hooks.UnquantizedEngine(run.config, run.actor.weights)
    engine.sync(run.actor.weights.for_engine())
    drawn = engine.sample(
        run.cache(run.prompts.next(2)),
        range(2),
        training_step=1,
        with_means=True,
    )
    exact, coarse = (
        (actor.log_probs(drawn).log_probs - drawn.log_probs).abs() for actor in (engine.actor, run.actor)
    )
    assert exact.max() < 1e-5 < coarse.max()


def test_longer_steps_are_compared_after_as_many_steps_and_in_equal_cpu_time(study, tmp_path):
    phase, of_detail = study.run.longer(), study.run.longer_jpeg()
    own, three, one = phase.arms
    assert (own.references, three.references, one.references) == (
        [study.arms.Arm.parse("fp32/two/uncorrected")],
        [own],
        [own],
    )
    assert [phase.evaluations(arm) for arm in phase.arms] == [[18], [18, 20], [18, 22]]
    sampling = [config.load(phase.recipe, arm.overrides()).sampling for arm in phase.arms]
    assert [each.post_window_stride for each in sampling] == [1, 2, 6]
    assert config.load(phase.recipe, own.overrides()).rollout == config.load(phase.recipe).rollout

    few = tuple(key for key in SMALL if not key.startswith("sampling."))
    steps = {"fp8": 1, "fp8_longer_2": 2, "fp8_longer_6": 2}
    small = replace(phase, seeds=(120, 121), words=4, steps=steps, evaluated=1, overrides=few)
    study.run.do(small, tmp_path, 1)
    detail = replace(of_detail, seeds=(150, 151), words=4, steps={"two": 2}, overrides=few)
    study.run.do(detail, tmp_path, 1)
    rows = {name: study.run.read(tmp_path / f"{name}.csv") for name in ("longer", "longer_jpeg")}
    assert [row["step"] for row in rows["longer"]] == 2 * ["1", "1", "2", "1", "2"]
    text = study.analysis.analyse({name: [] for name in study.run.PHASE_NAMES} | rows, tmp_path)
    assert (
        text.count(f"- {one} against {own}, 2 seeds: ")
        == text.count(f"- {three} against {own}, 2 seeds: ")
        == 2
    )
    rewards = {row["arm"]: float(row["reward"]) for row in rows["longer_jpeg"] if row["seed"] == "151"}
    assert len(rewards) == 2
    assert "| At equal steps | reward | against |" in (tmp_path / "longer_jpeg.md").read_text(
        encoding="utf-8"
    )


def test_longer_steps_replace_all_that_follow_the_window_in_every_other_setting(study, tmp_path):
    phase = study.run.longer_elsewhere()
    settings = {arm: config.load(phase.recipe, arm.overrides()).sampling for arm in phase.arms}
    for own, longer in zip(phase.arms[::2], phase.arms[1::2], strict=True):
        assert longer.references == [own]
        assert replace(settings[longer], post_window_stride=1) == settings[own]
        left = settings[own].num_inference_steps - settings[own].sde_window_range[1]
        assert settings[longer].post_window_stride == left
    assert [phase.evaluations(arm)[-1] for arm in phase.arms] == [18, 18, 12, 12, 12, 12]

    few = tuple(key for key in SMALL if not key.startswith("sampling."))
    steps = dict.fromkeys(phase.steps, 1)
    study.run.do(replace(phase, seeds=(170, 171), words=4, steps=steps, overrides=few), tmp_path, 1)
    rows = {phase.name: study.run.read(tmp_path / f"{phase.name}.csv")}
    text = study.analysis.analyse({name: [] for name in study.run.PHASE_NAMES} | rows, tmp_path)
    for own, longer in zip(phase.arms[::2], phase.arms[1::2], strict=True):
        assert text.count(f"- {longer} against {own}, 2 seeds: ") == 1


def test_exchanged_images_are_those_of_the_next_wrong_sample_of_a_group(study, tmp_path):
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    is_wrong = torch.tensor([True, False, True, True, False, True, False])
    assert study.hooks.exchanged(groups, is_wrong).tolist() == [3, 1, 0, 2, 4, 5, 6]

    run, _ = build_run(config.load(study.run.RECIPE, [*SMALL, "data.num_heldout=2"]))
    run.engine.sync(run.actor.weights.snapshot())
    engine = study.hooks.ExchangedImages(run.engine, share=0.5, seed=0)
    conditioning = run.cache(run.prompts.next(2))
    sampling = {"training_step": 1, "with_means": True}
    plain, drawn = (one.sample(conditioning, range(2), **sampling) for one in (run.engine, engine))
    places = study.hooks.exchanged(plain.group_ids, engine.is_wrong(8, 1))
    assert not torch.equal(places, torch.arange(8))
    assert torch.equal(drawn.images, plain.images[places])
    assert torch.equal(drawn.log_probs, plain.log_probs)

    phase = study.run.exchanged()
    four, eight = phase.arms
    assert (four.exchanged, eight.exchanged, four.references[1].exchanged) == (0.4, 0.8, 0.0)
    few = tuple(key for key in SMALL if not key.startswith("sampling."))
    small = {"seeds": (120, 121), "words": 4, "overrides": few}
    beside = replace(
        study.run.longer(), **small, steps=dict.fromkeys(("fp8", "fp8_longer_2", "fp8_longer_6"), 1)
    )
    for each in (replace(beside, arms=tuple(four.references)), replace(phase, **small, steps={"two": 1})):
        study.run.do(replace(each, evaluated=1), tmp_path, 1)
    rows = {name: study.run.read(tmp_path / f"{name}.csv") for name in ("longer", "exchanged")}
    text = study.analysis.analyse({name: [] for name in study.run.PHASE_NAMES} | rows, tmp_path)
    for left, right in itertools.product((four, eight), four.references):
        assert f"- {left} against {right}, 2 seeds: " in text


@pytest.mark.quantized
def test_the_arms_of_a_quantized_trainer_run_and_are_scored_on_both_bases(study, tmp_path):
    phase = study.run.quantized()
    chosen = [arm for arm in phase.arms if arm.correction in ("uncorrected", "step_kl", "step_kl_random")]
    small = replace(phase, arms=tuple(chosen), seeds=(40,), words=4, steps={"two": 1}, overrides=SMALL)
    study.run.do(small, tmp_path, 1)
    rows = study.run.read(tmp_path / "quantized.csv")
    assert [row["arm"] for row in rows] == [str(arm) for arm in chosen]
    assert [float(row["kl"]) > 1e-5 for row in rows] == [False, True, True, True]
    assert study.run.rejected_share(rows, chosen[-1], 40) == float(rows[2]["rejected"])
    assert rows[0]["reward"] == rows[0]["served_reward"]
    found = study.analysis.analyse(
        {name: [] for name in study.run.PHASE_NAMES} | {"quantized": rows}, tmp_path
    )
    assert "unquantized base |" in found


def test_equivalence_is_two_one_sided_tests(study):
    def verdict(shift):
        plain = [[0.5, 0.6, 0.7], [0.5, 0.6, 0.7]]
        other = [[value + shift + place / 1000 for place, value in enumerate(values)] for values in plain]
        of_both = rows("fp32/two/uncorrected", plain, old_log_prob=1)
        of_both += rows("int4/two/uncorrected", other, old_log_prob=1)
        return study.analysis.equivalence(study.analysis.Study(of_both))

    # Differences shift + 0, 1e-3, 2e-3: error 1e-3 / sqrt(3), times 2.92, the t of 2 degrees that 90 % lie within.
    assert re.findall(r"\d\.\d+", verdict(0.0)) == ["0.0010", "0.0017", "0.02"]  # mean, half width, margin
    assert [verdict(shift).endswith(": equivalent.") for shift in (0.0, 0.0175)] == [True, False]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tiny_screen_is_cached_and_analysed(study, tmp_path, capsys, jobs):
    names = ("int4/two/uncorrected", "int4/two/step_mean")
    phase = replace(
        study.run.screen(),
        arms=tuple(map(study.arms.Arm.parse, names)),
        seeds=(0,),
        words=4,
        steps={"two": 1},
        overrides=SMALL,
    )
    study.run.do(phase, tmp_path, jobs)
    with (tmp_path / "screen.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    found.sort(key=lambda row: row["arm"], reverse=True)
    assert [(row["arm"], row["seed"], row["step"]) for row in found] == [(name, "0", "1") for name in names]
    for row in found:
        assert 0 <= float(row["exact_match"]) <= 1
        assert float(row["gap"]) > 1e-4
        assert float(row["cpu_seconds"]) < float(row["cpu_total"])
    assert float(found[0]["grad_norm"]) != float(found[1]["grad_norm"])
    assert "screen 2/2" in capsys.readouterr().out

    before = (tmp_path / "screen.csv").read_bytes()
    study.run.do(phase, tmp_path, jobs)
    assert (tmp_path / "screen.csv").read_bytes() == before

    rows = {name: study.run.read(tmp_path / f"{name}.csv") for name in study.run.PHASE_NAMES}
    text = study.analysis.analyse(rows, tmp_path)
    assert f"| {names[1]} |" in text
    assert (tmp_path / "table.md").read_text() == text
    assert (tmp_path / "screen.png").stat().st_size > 5000


def test_differences_of_noise_are_rarely_significant(study):
    rng = random.Random(0)
    ps = [study.analysis.paired_t([rng.gauss(0, 1) for _ in range(8)])[2] for _ in range(2000)]
    assert sum(p < 0.05 for p in ps) / 2000 == pytest.approx(0.05, abs=0.015)
