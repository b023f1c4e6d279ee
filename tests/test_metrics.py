import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr import distributed, metrics
from flowcorr.metrics import KINDS, Metrics, Over, Stat

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def stats_of(values):
    """All kinds of stats of some values, as a loss would make them of one micro-batch."""
    # A value that does not count stands beside them, as large as float32 can be.
    x = torch.tensor([*values, 1e38], dtype=torch.float64)
    over = Over(x < 1e38)
    return {
        "mean": over.mean(x),
        "std": over.std(x),
        "ess": Stat("ess", over.std(x).parts),
        "share": over.share(x > 0),
        "count": metrics.total(len(values)),
        "max": over.max(x),
        "min": over.min(x),
        "moments": Stat("moments", over.std(x).parts),
        "counts": Stat("counts", ((x[:-1, None] > torch.tensor([-50, 0, 50])).double().sum(0),)),
    }


def describe(values):
    return Metrics(stats_of(values))


def std_of(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


@settings(max_examples=50)
@given(VALUES)
def test_each_kind_against_its_definition(values):
    computed = describe(values).compute()
    assert computed["mean"] == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert computed["std"] == pytest.approx(std_of(values), rel=1e-9, abs=1e-12)
    assert computed["count"] == len(values)
    assert computed["share"] == sum(value > 0 for value in values) / len(values)
    assert (computed["max"], computed["min"]) == (max(values), min(values))
    squares = math.fsum(value**2 for value in values)
    if squares > 1e-3:
        assert computed.get("ess", 0.0) == pytest.approx(
            math.fsum(values) ** 2 / (len(values) * squares), abs=1e-9
        )


@settings(max_examples=50)
@given(VALUES, st.data())
def test_parts_merge_to_the_whole_however_they_are_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    merged, whole = (
        Metrics(describe(values[:cut]), describe(values[cut:])),
        describe(values),
    )
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-9, abs=1e-12)
    assert merged.on_host().compute() == merged.compute()
    assert merged.parts("counts") == whole.parts("counts")
    assert merged.parts("moments")[0] == pytest.approx(whole.parts("moments")[0], rel=1e-9, abs=1e-12)
    assert merged.parts("unknown") == []


WEIGHTS = [1.0, 2.0, 4.0, 4.0, 1.5]


@pytest.mark.parametrize("unit", [math.exp(-25), math.exp(-16), 1.0, math.exp(20)])
@pytest.mark.parametrize("cut", [0, 2])
def test_effective_sample_size_has_no_unit(unit, cut):
    weights = [unit * weight for weight in WEIGHTS]
    computed = Metrics(describe(weights[:cut]), describe(weights[cut:])).compute()
    share = sum(WEIGHTS) ** 2 / (len(WEIGHTS) * sum(weight**2 for weight in WEIGHTS))
    assert computed["ess"] == pytest.approx(share, rel=1e-12)
    assert computed["std"] == pytest.approx(unit * statistics.stdev(WEIGHTS), rel=1e-12)


def test_one_small_weight_is_a_whole_sample():
    assert describe([math.exp(-20)]).compute()["ess"] == 1.0


@given(VALUES)
def test_effective_sample_size_is_a_share(values):
    ess = describe([math.exp(value / 10) for value in values]).compute()["ess"]
    assert 0 < ess <= 1


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_std_of_values_near_a_constant_does_not_cancel(cut):
    values = [1.0 + 1e-8, 1.0 - 1e-8, 1.0 + 3e-8]
    computed = Metrics(describe(values[:cut]), describe(values[cut:])).compute()
    assert computed["std"] == pytest.approx(2e-8, rel=1e-7)
    assert computed["mean"] - 1.0 == pytest.approx(1e-8, rel=1e-7)


def test_values_elsewhere_may_be_as_large_as_float32_is():
    x = torch.tensor([1.0, 2.0, 3e38])
    over = Over(x < 1e38)
    found = Metrics({"mean": over.mean(x), "std": over.std(x)}).compute()
    assert found == pytest.approx({"mean": 1.5, "std": math.sqrt(0.5)})


def test_metrics_that_saw_no_term_are_left_out():
    empty = describe([])
    assert empty.compute() == {"count": 0.0}
    assert empty.merge(describe([3.0])).compute() == describe([3.0]).merge(empty).compute()
    assert empty.merge(describe([3.0])).compute() == describe([3.0]).compute()


def test_a_mean_that_is_not_finite_is_no_missing_one():
    values = Metrics({"mean": metrics.mean(math.nan, 3)})
    assert math.isnan(values.merge(Metrics({"mean": metrics.mean(1.0, 1)})).compute()["mean"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["maximum", "minimum", "total"])
def test_a_value_that_is_not_finite_is_shown(kind, bad):
    stat = getattr(metrics, kind)
    one, other = (Metrics({"x": stat(value)}) for value in (1.0, bad))
    expected = {"maximum": max, "minimum": min, "total": lambda *values: sum(values)}[kind](1.0, bad)
    for merged in (one.merge(other), other.merge(one)):
        found = merged.compute()["x"]
        assert math.isnan(found) if math.isnan(bad) else found == expected


def test_one_term_has_a_std_of_zero():
    assert describe([2.0]).compute()["std"] == 0.0


def test_metrics_by_index_merge_by_index():
    short, long = (
        Metrics({"step_{}/kl": metrics.mean(torch.tensor(sums), torch.tensor(counts))})
        for sums, counts in (([1.0, 6.0], [1, 2]), ([3.0, 0.0, 0.0, 5.0], [1, 0, 0, 1]))
    )
    both = {"step_0/kl": 2.0, "step_1/kl": 3.0, "step_3/kl": 5.0}
    assert short.merge(long).compute() == long.merge(short).compute() == both
    assert long.on_host().merge(short).compute() == both


def test_prefixes():
    merged = describe([1.0, 2.0]).prefixed("a/").merge(describe([3.0]).prefixed("b/"))
    computed = merged.compute()
    assert computed["a/mean"] == 1.5
    assert computed["b/mean"] == 3.0
    assert merged.prefixed("run/").compute()["run/a/max"] == 2.0


def test_two_producers_of_one_name_are_a_mistake():
    both = Metrics({"loss": metrics.mean(1.0, 1)}).merge(Metrics({"loss": metrics.total(1.0)}))
    with pytest.raises(AssertionError, match="^metric loss "):
        both.compute()


def test_merging_changes_neither_side():
    one, other = describe([1.0, 2.0]), describe([5.0])
    before = one.compute(), other.compute()
    one.merge(other)
    one.prefixed("x/")
    assert (one.compute(), other.compute()) == before


def test_nothing_at_all():
    assert Metrics().compute() == Metrics({}).compute() == Metrics().compute() == {}
    assert Metrics().across_ranks().compute() == {}


def test_parts_are_detached_and_kept_in_float64():
    one = Metrics({"mean": metrics.mean(torch.tensor(1.0, requires_grad=True), 1)})
    many = Metrics(*[one] + [Metrics({"mean": metrics.mean(1e-9, 0)})] * 1000)
    assert many.compute()["mean"] == pytest.approx(1.0 + 1e-6, abs=1e-12)


def test_every_kind_is_covered_here():
    assert {stat.kind for stat in stats_of([1.0]).values()} == set(KINDS)


def merged_over_ranks():
    x = torch.tensor([[0.1, 0.7, 4.0], [0.2, -3.0, 0.3]], dtype=torch.float64)[distributed.rank()]
    over = Over(torch.ones(3, dtype=torch.bool))
    stats = {"mean": over.mean(x), "std": over.std(x), "max": over.max(x), "min": over.min(x)}
    stats["count"] = metrics.total(3)
    return Metrics(stats).across_ranks().compute()


def test_ranks_merge_to_the_whole_and_agree_in_every_bit(two_ranks):
    first, second = two_ranks.call(merged_over_ranks)
    values = [0.1, 0.7, 4.0, 0.2, -3.0, 0.3]
    expected = {"mean": statistics.fmean(values), "std": statistics.stdev(values), "max": 4.0, "min": -3.0}
    assert first == second == pytest.approx(expected | {"count": 6.0}, rel=1e-12)
