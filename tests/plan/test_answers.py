"""The sentences of a plan, on numbers made by hand."""

import json
from dataclasses import replace

import pytest

from flowcorr.plan.answers import MARGIN, Memory, Merging, Phase, Plan, duration, gigabytes, summary
from flowcorr.plan.devices import GPUS, Utilisation
from flowcorr.plan.engine import ADAPTED

GB = 1e9
H100 = GPUS["h100-80gb"]


def plan_of(*, engine=0.0, sleeps=False, beside=True, **changes):
    """A trainer whose update needs 30 GB and 2 GB for each sample, 46 GB at its peak."""
    memory = Memory(
        load=20 * GB, encode=25 * GB, idle=10 * GB, sample=15 * GB, decode=16 * GB, reward=12 * GB,
        recompute=18 * GB, update=46 * GB, update_without_samples=30 * GB, update_a_sample=2 * GB, sync=11 * GB,
        engine=engine, engine_sleeps=sleeps, may_share=beside,
    )  # fmt: skip
    phases = (
        Phase(name="load", where="trainer", peak=20 * GB, seconds=60.0),
        Phase(name="sample", where="trainer", peak=15 * GB, seconds=20.0),
        Phase(name="recompute", where="trainer", peak=18 * GB, seconds=5.0),
        Phase(name="update", where="trainer", peak=46 * GB, seconds=15.0),
        Phase(name="reward ocr", where="host", peak=None, seconds=None),
    )
    plan = Plan(
        title="recipe", gpu=H100, utilisation=Utilisation(), ranks=1, images=32, phases=phases,
        memory=memory, micro_batch=8, mini_batch=16, bypass=False,
    )  # fmt: skip
    return replace(plan, **changes)


def on_gpu(plan, memory):
    return replace(plan, gpu=replace(H100, memory=memory))


@pytest.mark.parametrize(
    ("memory", "verdict"), [(46 * GB * MARGIN, "Fits"), (47 * GB, "May not fit"), (45 * GB, "Does not fit")]
)
def test_a_peak_fits_with_its_margin(memory, verdict):
    fit = on_gpu(plan_of(), 1.0001 * memory).answers()[0]
    assert fit.startswith(f"{verdict} ")
    assert "needs 46.0 GB at its peak, in update" in fit


@pytest.mark.parametrize(
    ("room", "answer"),
    [
        (46, "actor.micro_batch_size=8 fits; the largest that does is 8."),
        (90, "actor.micro_batch_size=8 fits; the largest that does is 16."),  # all samples of a mini-batch
        (37, "actor.micro_batch_size=8 does not fit; use actor.micro_batch_size=3."),
        (31, "No actor.micro_batch_size fits: one sample takes 36.2 GB with the margin"),
    ],
)
def test_the_largest_micro_batch_that_fits_is_named(room, answer):
    plan = on_gpu(plan_of(), 1.0001 * room * GB * MARGIN)
    assert plan.answers()[1].startswith(answer)


def test_an_optimizer_with_which_the_trainer_fits_is_named():
    smaller = replace(plan_of().memory, update=40 * GB, update_without_samples=24 * GB)
    ways = {"actor.optimizer=adamw_8bit": smaller}
    neither = "in update; with the margin 52.0 GB."
    for room, fit, micro_batch in (
        (46, neither, "actor.micro_batch_size=8 fits;"),
        (40, "With actor.optimizer=adamw_8bit it needs 40.0 GB and fits.", "use actor.micro_batch_size=5."),
        (31, neither, "use actor.optimizer=adamw_8bit, with which the largest that fits is 3."),
        (25, neither, "use a GPU with more memory"),
    ):
        answers = on_gpu(plan_of(ways_to_fit=ways), 1.0001 * room * GB * MARGIN).answers()
        assert answers[0].endswith(fit)
        assert micro_batch in answers[1]


def test_where_nothing_fits_other_ways_are_named():
    plan = on_gpu(plan_of(other_ways=("more ranks", "actor.optimizer=adamw_8bit")), 10 * GB)
    assert plan.answers()[1].endswith(
        "; use a GPU with more memory, more ranks, actor.optimizer=adamw_8bit, or fewer images a step."
    )


def test_an_engine_shares_the_gpu_or_does_not():
    assert plan_of().answers()[2] == "The trainer samples by itself, so no engine needs memory."
    small, large = plan_of(engine=10 * GB), plan_of(engine=60 * GB)
    assert small.memory.shared == 56 * GB
    assert small.answers()[2].startswith("Trainer and engine can share a GPU: together 56.0 GB")
    assert "cannot share a GPU: together 106.0 GB, with the margin 119.8 GB," in large.answers()[2]
    assert plan_of(engine=60 * GB, sleeps=True).memory.shared == 70 * GB  # of the idle trainer and the engine
    assert plan_of(engine=60 * GB, beside=False).answers()[2].startswith("The engine has GPUs of its own")


def test_a_way_to_share_is_named():
    fewer = plan_of(engine=30 * GB)
    assert fewer.answers()[2].endswith("; with actor.micro_batch_size=7 they can.")
    asleep = plan_of(engine=60 * GB, ways_to_share={"rollout.engine.enable_sleep_mode=true": 70 * GB})
    assert "with rollout.engine.enable_sleep_mode=true they need 70.0 GB and can" in asleep.answers()[2]


def test_bypass_mode_saves_the_recompute_pass():
    plan = plan_of()
    assert (plan.seconds(), plan.seconds("recompute", "update")) == (40.0, 20.0)
    assert plan.answers()[-1].endswith("would save the recompute pass: 5 s of a step of 40 s.")
    assert replace(plan, bypass=True).answers()[-1] == "Bypass mode has no recompute pass: a step of 40 s."


def test_overlapping_sides_take_as_long_as_the_longer_one():
    sampling = Phase.within_tolerance(name="sample", where="engine", peak=1 * GB, seconds=60.0)
    training = Phase.within_tolerance(name="update", where="trainer", peak=1 * GB, seconds=40.0)
    alternating = plan_of(phases=(sampling, training))
    assert (alternating.seconds(), alternating.band) == (100.0, (75.0, 125.0))
    overlapping = replace(alternating, overlaps=True)
    assert (overlapping.seconds(), overlapping.band) == (60.0, (45.0, 75.0))
    assert overlapping.seconds("update") == 40.0
    assert "the longer of the two" in overlapping.answers()[-2]


def test_the_engines_speed_and_what_merging_saves_are_said():
    plan = plan_of(engine=10 * GB)
    engine = replace(plan, engine=ADAPTED, merging=Merging(sampling=120.0, sync=3.0)).answers()
    assert engine[-3].startswith(
        "The engine (compiled, with adapters) samples at 41% of the peak, 24% to 48%:"
    )
    assert "would save 120 s of sampling and add 3 s to the sync" in engine[-2]
    assert "an early adapter may vanish" in engine[-2]
    assert not any("merged" in answer for answer in plan.answers())


def test_a_plan_survives_json():
    mapping = json.loads(json.dumps(plan_of(engine=10 * GB).to_mapping(), allow_nan=False))
    assert (mapping["trainer_peak"], mapping["shared_peak"]) == (46 * GB, 56 * GB)
    assert (mapping["fits"], mapping["shared_fits"]) == (True, True)


def test_numbers_are_written_for_a_reader():
    assert (gigabytes(2.34e9), gigabytes(5e6)) == ("2.3 GB", "5.0 MB")
    assert (duration(0.123), duration(59.6)) == ("0.12 s", "60 s")
    assert summary(plan_of()).startswith(f"recipe on {H100.name}: ")
    assert summary(replace(plan_of(), ranks=4)).endswith("; 4 ranks, 32 images a step each")


def test_the_smallest_cards_are_named_with_their_keys():
    plan = plan_of(engine=60 * GB)  # the trainer needs 46 GB, or 32 GB with one sample
    gpu, keys = plan.smallest_for_trainer()
    assert (gpu.name, keys) == ("a100-40gb-pcie", "actor.micro_batch_size=1")
    assert plan.smallest_for_engine() == (GPUS["a100-80gb-pcie"], "")
    (answer,) = (text for text in plan.answers() if text.startswith("The smallest card"))
    assert answer.removeprefix("The smallest card for the trainer: ") == (
        "a100-40gb-pcie with actor.micro_batch_size=1; for the engine: a100-80gb-pcie."
    )
    smaller = replace(
        plan.memory, encode=9 * GB, load=9 * GB, update=12 * GB, update_without_samples=9 * GB,
        recompute=9 * GB, reward=9 * GB, sync=9 * GB,
    )  # fmt: skip
    ways = {"model.offload_text_encoders=true": smaller}
    offloaded = replace(plan, ways_to_fit=ways, engine_ways={"rollout.engine.quantization=fp8": 28 * GB})
    gpu, keys = offloaded.smallest_for_trainer()
    assert (gpu.name, keys) == ("rtx4080-16gb", "model.offload_text_encoders=true")
    gpu, keys = offloaded.smallest_for_engine()
    assert (gpu.name, keys) == ("rtx5090-32gb", "rollout.engine.quantization=fp8")


def test_a_run_that_fits_no_card_and_an_engine_in_process_are_said():
    huge = plan_of().memory
    huge = replace(huge, load=400 * GB)
    answers = replace(plan_of(), memory=huge).answers()
    assert "The smallest card for the trainer: none of those known." in answers
