"""Short runs of the embedded model for the doctor, one of them shared by tests that only alter its answers.

And the samples of another trainer's loop.
"""

from dataclasses import replace

import pytest
from instruments.doctor.faults import SHORT, SMALL
from instruments.doctor.plain_loop import Loop

from flowcorr import ReplaySamples
from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.models import load_family
from tests.shallow import SHALLOW


@pytest.fixture
def small_run(make_run):
    """A run of few and short trajectories whose adapter has already learned something."""

    def make(*, stirred=True, **sections):
        small = {"rollout": SMALL, "sampling": SHORT}
        merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {*small, *sections}}
        run = make_run(**merged)
        if stirred:
            run.stir()
        return run

    return make


@pytest.fixture
def full_run(small_run, make_config):
    """A run that trains all weights."""
    lora = replace(make_config().model.lora, rank=0)
    return small_run(stirred=False, model={"lora": lora}, rollout={"emulate": "int8"})


@pytest.fixture(scope="session")
def shared_run(make_run):
    """A healthy run whose engine answers the same question only once."""
    run = make_run(rollout=SMALL, sampling=SHORT)
    run.stir()
    sample, answers = run.engine.sample, {}

    def remembered(conditioning, groups, *, training_step, with_means):
        weights = sum(float(tensor.double().sum()) for tensor in run.engine.history[0].tensors.values())
        question = (weights, tuple(groups), training_step)
        if question not in answers:
            answers[question] = sample(
                conditioning, groups, training_step=training_step, with_means=with_means
            )
        return answers[question]

    run.engine.sample = remembered
    return run


@pytest.fixture
def recorded(shared_run):
    """`shared_run`, whose answers a test may alter."""
    sample = shared_run.engine.sample
    yield shared_run
    shared_run.engine.sample = sample


@pytest.fixture(scope="session")
def captured():
    """What a clean step captured, of a window with Euler steps before, in and after it."""
    return Loop(window="middle").sample()


@pytest.fixture
def stack_of(captured):
    """A function from changed fields to a stack with the samples."""

    def make(**changes):
        fields = {name: value for name, value in (captured | changes).items() if value is not None}
        return Stack(load_family(ModelConfig(path=SHALLOW)), ReplaySamples(**fields))

    return make


@pytest.fixture
def captured_of(stack_of):
    """A function from changed fields to what the checks look at."""

    def make(*, step=0, earlier=None, config=None, terms=None, **changes):
        pool = ["cat", "dog", "sun", "bee"]
        samples = {"stack": stack_of(**changes), "step": step, "earlier": earlier or {}, "terms": terms or {}}
        return Captured(**samples, pool=pool, config=config)

    return make
