"""Layouts on numbers of GPUs, for the embedded model, and the commands that start them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from flowcorr.config import load
from flowcorr.plan.answers import MARGIN, Phase
from flowcorr.plan.devices import GPUS
from flowcorr.plan.layouts import Layout, compare, end_of_shrinking, layouts

H100 = GPUS["h100-80gb"]
RECIPE = "tiny_ocr_lora"
ENGINE = ("rollout.name=vllm_omni", "rollout.dtype=bfloat16")


def kinds(gpus, *overrides):
    return {layout.name for layout in layouts(load(RECIPE, overrides), gpus)}


def test_each_kind_that_flowcorr_runs_is_compared():
    assert kinds(1) == {"all train and sample"}
    assert kinds(1, *ENGINE) == {"all train and sample", "all train and sample, the engine asleep in between"}
    splits = {"train : sample, in turn", "train : sample, a step ahead"}
    assert kinds(4, *ENGINE) == kinds(1, *ENGINE) | splits | {"all train and sample, sharded weights"}
    assert (
        kinds(4, *ENGINE, "model.quantization=nf4") == kinds(1, *ENGINE) | splits
    )  # FSDP2 cannot gather codes
    assert kinds(4, "model.lora.rank=0", "actor.fsdp=true") == {"all train and sample, sharded weights"}


@pytest.mark.parametrize(
    "overrides", [(), ENGINE, ("model.lora.rank=0", "actor.fsdp=true"), (*ENGINE, "model.lora.rank=0")]
)
def test_every_layout_is_a_valid_run_that_uses_its_gpus(overrides):
    for layout in layouts(load(RECIPE, overrides), 4):
        run = load(RECIPE, [*overrides, *layout.overrides])
        assert layout.ranks + (run.rollout.num_workers if layout.workers else 0) == layout.gpus == 4


def test_ranks_of_several_machines_fill_them():
    many = load(RECIPE, [*ENGINE, "rollout.prompts_per_step=24"])
    assert {layout.ranks for layout in layouts(many, 32)} == {
        *range(1, 9),
        16,
        24,
    }  # 32 ranks would lack prompts


def test_ranks_that_share_the_weights_share_the_prompts_equally():
    sharded = ("model.lora.rank=0", "actor.fsdp=true")  # and 8 prompts
    assert kinds(3, *sharded) == kinds(16, *sharded) == set()
    assert kinds(8, *sharded) == {"all train and sample, sharded weights"}


def test_lines_start_what_they_plan():
    (both,) = Layout(name="", ranks=8, overrides=("a=1",)).lines("mine", ("b=2",))
    assert both == "torchrun --nproc_per_node 8 -m flowcorr train mine b=2 a=1"
    (one,) = Layout(name="", ranks=1).lines("mine", ())
    assert one == "flowcorr train mine"
    (machines,) = Layout(name="", ranks=16).lines("mine", ())
    assert "--nnodes 2" in machines
    assert "on each of 2 machines" in machines
    ray, train = Layout(name="", ranks=1, workers=3).lines("mine", ())
    assert ray == "CUDA_VISIBLE_DEVICES=1,2,3 ray start --head"
    assert train == "CUDA_VISIBLE_DEVICES=0 RAY_ADDRESS=auto flowcorr train mine"
    cluster, train = Layout(name="", ranks=8, workers=24).lines("mine", ())
    assert cluster.startswith("ray start --head")
    assert "24 GPUs" in cluster
    assert train.startswith("RAY_ADDRESS=HOST:6379 torchrun --nproc_per_node 8")


@pytest.fixture(scope="module")
def found():
    return compare(RECIPE, ENGINE, gpu=H100, gpus=(1, 4, 16, 32))


@pytest.mark.fake_device
def test_the_fastest_layout_that_fits_comes_first(found):
    for made in found.values():
        assert all(layout.fits for layout in made)
        assert all(one.seconds <= other.seconds for one, other in pairwise(made))
        assert len({layout.layout.name for layout in made}) == len(made)


@pytest.mark.fake_device
def test_a_row_says_what_bounds_a_step_and_what_idles(found):
    rows = {made.layout.name: made for made in found[4]}
    turns, ahead = rows["train : sample, in turn"], rows["train : sample, a step ahead"]
    both = rows["all train and sample"]
    assert ahead.seconds < turns.seconds
    assert {"trainers", "engines"} == {part.split()[0] for part in turns.idle.split(", ")}
    for made in rows.values():
        assert made.images_per_second == pytest.approx(made.images / made.seconds)
        assert made.bound in made.spent
        assert made.spent[made.bound] == max(made.spent.values())
    assert both.images == 96
    asleep = rows["all train and sample, the engine asleep in between"]
    assert asleep.plan.memory.shared < both.plan.memory.shared
    assert asleep.plan.seconds("sync") > both.plan.seconds("sync")


@pytest.mark.fake_device
def test_ocr_gets_all_cores(found):
    for gpus, made in found.items():
        assert f"reward.num_workers={8 * gpus}" in made[0].lines[-1]


@pytest.mark.fake_device
def test_a_step_stops_shrinking_where_more_gpus_do_not_help(found):
    def taking(seconds, ranks):
        row = found[1][0]
        phase = Phase.within_tolerance(name="update", where="trainer", peak=None, seconds=seconds)
        plan = replace(row.plan, phases=(phase,))
        return [replace(row, layout=Layout(name="", ranks=ranks), plan=plan, spent={"training": seconds})]

    four, eight, sixteen = taking(40.0, 4), taking(20.0, 8), taking(18.0, 16)
    assert end_of_shrinking({4: four, 8: eight}) == "A step shrinks up to 8 GPUs."
    says = "A step stops shrinking at 8 GPUs: with 16 it takes 18 s instead of 20 s, since"
    prompts = "rollout.prompts_per_step=8, and a prompt is never split."
    assert end_of_shrinking({4: four, 8: eight, 16: sixteen}) == f"{says} {prompts}"
    assert end_of_shrinking({8: eight, 16: taking(18.0, 7)}) == f"{says} training bounds it."
    assert end_of_shrinking({32: []}) == "No layout fits."


@pytest.mark.fake_device
def test_a_micro_batch_that_does_not_fit_is_lowered_in_the_lines(found):
    plan = found[1][0].plan
    size, memory = plan.micro_batch // 2, plan.memory
    needed = memory.update_without_samples + size * memory.update_a_sample + memory.engine
    small = replace(H100, memory=1.001 * MARGIN * needed)
    made = {row.layout.name: row for row in compare(RECIPE, ENGINE, gpu=small, gpus=(1,))[1]}
    both = made["all train and sample"]
    assert both.fits
    assert both.micro_batch == size
    assert f"actor.micro_batch_size={size}" in both.lines[-1]
