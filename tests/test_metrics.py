import json
import math
import statistics
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr import metrics
from flowcorr.metrics import KINDS, Block, Field, Layout, Metrics, Stat

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def describe(values):
    """All kinds of metrics of some values, as a loss would make them of one micro-batch."""
    x = torch.tensor(values, dtype=torch.float64)
    count, excess = x.numel(), x - 1
    return Metrics.from_stats(
        {
            "mean": metrics.mean(x.sum(), count),
            "near_one": Stat("mean_plus_one", (excess.sum(), count)),
            "std": metrics.std(excess.sum(), excess.square().sum(), count),
            "ess": Stat("ess", (x.sum(), x.square().sum(), count)),
            "ess_near_one": Stat("ess_plus_one", (excess.sum(), excess.square().sum(), count)),
            "count": metrics.total(count),
            "max": metrics.maximum(x.max()),
            "min": metrics.minimum(x.min()),
        }
    )


@settings(max_examples=50)
@given(VALUES)
def test_each_kind_against_its_definition(values):
    computed = describe(values).compute()
    mean = statistics.fmean(values)
    squares = math.fsum(value**2 for value in values)
    assert computed["mean"] == pytest.approx(mean, abs=1e-12)
    assert computed["near_one"] == pytest.approx(mean, abs=1e-12)
    assert computed["std"] == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-5)
    assert computed["count"] == len(values)
    assert (computed["max"], computed["min"]) == (max(values), min(values))
    if squares > 1e-3:
        ess = math.fsum(values) ** 2 / (len(values) * squares)
        assert computed["ess"] == pytest.approx(ess, abs=1e-9)
        assert computed["ess_near_one"] == pytest.approx(ess, abs=1e-7)


@settings(max_examples=50)
@given(VALUES, st.data())
def test_parts_merge_to_the_whole_however_they_are_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    parts = [describe(part) for part in (values[:cut], values[cut:]) if part]
    merged, whole = Metrics.merged(parts).compute(), describe(values).compute()
    assert merged.keys() == whole.keys()
    for name in whole:
        assert merged[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-5)


def test_std_of_values_near_a_constant_does_not_cancel():
    excess = torch.tensor([1e-9, 3e-9], dtype=torch.float64)
    result = Metrics.from_stats({"std": metrics.std(excess.sum(), excess.square().sum(), 2)}).compute()
    assert result["std"] == pytest.approx(math.sqrt(2) * 1e-9)


def test_metrics_that_saw_no_term_are_left_out():
    nothing = {
        "mean": metrics.mean(0.0, 0),
        "std": metrics.std(0.0, 0.0, 0),
        "ess": Stat("ess", (0.0, 0.0, 0)),
        "max": metrics.maximum(-math.inf),
        "min": metrics.minimum(math.inf),
        "count": metrics.total(0),
    }
    empty = Metrics.from_stats(nothing)
    assert empty.compute() == {"count": 0.0}
    some = {name: Stat(stat.kind, tuple(1.0 for _ in stat.parts)) for name, stat in nothing.items()}
    assert Metrics.from_stats(some).merge(empty).compute() == Metrics.from_stats(some).compute()


def test_one_term_has_a_std_of_zero():
    assert Metrics.from_stats({"std": metrics.std(2.0, 4.0, 1)}).compute() == {"std": 0.0}


def test_prefixes():
    merged = describe([1.0, 2.0]).prefixed("a/").merge(describe([3.0]).prefixed("b/"))
    computed = merged.compute()
    assert computed["a/mean"] == 1.5
    assert computed["b/mean"] == 3.0
    assert merged.prefixed("run/").compute()["run/a/max"] == 2.0


def test_two_producers_of_one_name_are_a_mistake():
    both = Metrics.from_stats({"loss": metrics.mean(1.0, 1)}).merge(
        Metrics.from_stats({"loss": metrics.total(1.0)})
    )
    with pytest.raises(AssertionError, match="loss has two producers"):
        both.compute()


def test_merging_changes_neither_side():
    one, other = describe([1.0, 2.0]), describe([5.0])
    before = one.compute(), other.compute()
    one.merge(other)
    one.prefixed("x/")
    assert (one.compute(), other.compute()) == before


def test_nothing_at_all():
    assert Metrics().compute() == Metrics.from_stats({}).compute() == Metrics.merged([]).compute() == {}
    assert Metrics().across_ranks().compute() == {}


def test_parts_are_detached_and_kept_in_float64():
    total = torch.tensor(1.0, requires_grad=True)
    one = Metrics.from_stats({"mean": metrics.mean(total, 1)})
    many = Metrics.merged([one] + [Metrics.from_stats({"mean": metrics.mean(1e-9, 0)})] * 1000)
    assert many.compute()["mean"] == pytest.approx(1.0 + 1e-6, abs=1e-12)


def test_blocks_can_be_packed_by_their_producer():
    layout = Layout((Field("mean", "mean", (0, 2)), Field("total", "sum", (1,)), Field("low", "min", (0,))))
    sums = torch.tensor([6.0, 5.0, 4.0], dtype=torch.float64)
    block = Block(sums, torch.tensor([-2.0], dtype=torch.float64))
    assert Metrics({layout: block}).compute() == {"mean": 1.5, "total": 5.0, "low": 2.0}


def test_every_kind_is_covered_here():
    kinds = {field.kind for layout in describe([1.0])._blocks for field in layout.fields}
    assert kinds == set(KINDS)


RANK = """
import json, sys
import torch
import torch.distributed as dist
from flowcorr import metrics
from flowcorr.metrics import Metrics

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
x = torch.tensor([[0.1, 0.7, 4.0], [0.2, -3.0, 0.3]], dtype=torch.float64)[rank]
mine = Metrics.from_stats({
    "mean": metrics.mean(x.sum(), 3), "std": metrics.std(x.sum(), x.square().sum(), 3),
    "max": metrics.maximum(x.max()), "min": metrics.minimum(x.min()),
}).merge(Metrics.from_stats({"count": metrics.total(3)}))
print(json.dumps(mine.across_ranks().compute()))
dist.destroy_process_group()
"""


def test_ranks_merge_to_the_whole_and_agree_in_every_bit(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    first, second = (json.loads(rank.communicate(timeout=60)[0]) for rank in ranks)
    values = [0.1, 0.7, 4.0, 0.2, -3.0, 0.3]
    expected = {"mean": statistics.fmean(values), "std": statistics.stdev(values), "max": 4.0, "min": -3.0}
    assert first == second == pytest.approx(expected | {"count": 6.0}, rel=1e-12)
