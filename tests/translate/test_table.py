"""Tables of keys."""

import math
import re

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.flow_factory import TABLE as FLOW_FACTORY
from flowcorr.translate.flow_grpo import TABLE as FLOW_GRPO
from flowcorr.translate.resolved import resolved
from flowcorr.translate.table import Given, Left, Row, Table, decay_of_one, dtype_of, translate_values
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI
from tests.translate.configs import FACTORY, GRPO, RESOLVED

SOURCES = pytest.mark.parametrize(
    ("table", "values"),
    [
        (VERL_OMNI, RESOLVED | {"trainer": {**RESOLVED["trainer"], "save_freq": 0}}),
        (FLOW_GRPO, {**GRPO, "gpus": 4, "script": "train_sd3.py"}),
        (FLOW_FACTORY, FACTORY),
    ],
)


@SOURCES
def test_each_row_has_the_values_that_it_reads(table, values):
    """Of verl-omni and flow_grpo, which resolve all keys, only the keys of some versions have values of their own."""
    values = resolved(values, {})
    get = Given(values, table.absent, table.name)
    rows = table.rows(get).values()
    sources = {source for row in rows for source in (row.keys if isinstance(row, Row) else (row,))}
    missing = {source for source in sources if source not in get and source not in table.absent}
    assert missing <= {"actor_rollout_ref.actor.veomni_config.model_dtype"}


@SOURCES
def test_other_values_of_keys_that_have_few_equivalents_are_refused(table, values):
    for key, known in table.only.items():
        other = {bool: True, float: 1.0}.get(type(known[0]), "other")
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}={other} has no equivalent here"):
            translate_values(resolved(values, {key: other}), table)


def table(**changes):
    def rows(get):
        return {
            "actor.lr": "optim.lr",
            "rollout.n": Row("group", get("group"), "images of a prompt"),
            "actor.kl_coef": Row((), 0.0),
        }

    fields = {
        "name": "other",
        "required": (),
        "absent": {"optim.lr": 1e-3, "group": 16},
        "foreign": lambda get: "",
        "only": {},
        "refuse": lambda get: "",
        "rows": rows,
        "left": (Left("optim.eps", "another optimizer", (1e-8,)), Left("optim.*", "another optimizer")),
        "apart": ("workers.*",),
        "differences": ("the std",),
    }
    return Table(**{**fields, **changes})


def test_a_line_says_where_its_value_is_from():
    found = translate_values({"group": 8, "optim": {"eps": 1e-6}, "unheard_of": 1}, table())
    lines = {key: (line.value, line.comment) for key, line in found.lines.items()}
    assert lines["rollout.n"] == (8, "group (images of a prompt)")
    assert lines["actor.lr"] == (1e-3, "other's default of optim.lr; default here: 0.0003")
    assert "actor.kl_coef" not in lines  # the default here
    assert found.left == {
        "another optimizer": ["optim.eps=1e-06"],
        "unknown to flowcorr translate": ["unheard_of=1"],
    }
    assert found.without_effect == []
    assert found.sources == {"group", "optim.lr"}


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_what_is_neutral_is_only_counted(value):
    """False and 0 may be settings of a key that is not known; what is empty is not set."""
    given = {"optim": {"eps": 1e-8, "other": value, "_target_": "a.B"}, "unheard_of": value}
    found = translate_values({**given, "workers": {"number": 3}}, table())
    is_set = value is not None and value in (False, 0)
    assert (len(found.left), len(found.without_effect)) == (is_set, 4 - is_set)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"eval": {"scale": 3.0}, "train": {"scale": 3.0}}, []),
        ({"eval": {"scale": 3.0}, "train": {"scale": 2.0}}, ["eval.scale=3.0"]),
        ({"eval": {"scale": 3.5}}, ["eval.scale=3.5"]),
        ({"eval": {"scale": 2.0, "seed": 1}}, ["eval.seed=1"]),  # that of train is not set
        ({"train": {"scale": 3.0}}, []),
        ({"train": {"scale": 2.0}}, ["eval.scale=3.0, other's default"]),
    ],
)
def test_a_value_like_the_one_that_counts_changes_nothing(given, named):
    rules = (Left("eval.scale", "as in training", like="train.scale"), Left("eval.*", "why", like="train.*"))
    absent = {"optim.lr": 1e-3, "group": 16, "eval.scale": 3.0, "train.scale": 2.0}
    found = translate_values(given, table(left=rules, absent=absent, apart=("train.*",)))
    assert [entry for entries in found.left.values() for entry in entries] == named


def test_a_rule_may_depend_on_other_keys():
    rules = (Left("judge.*", "why", when=lambda get: get.plain("judged")),)
    for judged in (False, True):
        found = translate_values(
            {"judge": {"heat": 1.0}, "judged": judged}, table(left=rules, apart=("judged",))
        )
        assert ("judge.heat=1.0" in found.left.get("why", ())) == judged


@pytest.mark.parametrize(("value", "named"), [(True, False), (None, False), (False, True), (0.5, True)])
def test_a_rule_may_have_a_neutral_value_of_its_own(value, named):
    found = translate_values({"data": {"shuffle": value}}, table(left=(Left("data.*", "why", (True,)),)))
    assert ("why" in found.left) == named


def test_a_key_that_makes_no_line_is_counted():
    found = translate_values(
        {"group": 8}, table(rows=lambda get: {"rollout.n": Row("group", None)}, left=(Left("*", "why"),))
    )
    assert (found.left, found.without_effect) == ({}, ["group=8"])


def test_a_section_may_be_a_source():
    given = {"rewards": {"ocr": {"weight": 1}}}
    found = translate_values(
        given, table(rows=lambda get: {"reward.terms": Row("rewards", [*get("rewards")])})
    )
    assert (found.lines["reward.terms"].value, found.left, found.without_effect) == (
        ["ocr"],
        {},
        [],
    )


@pytest.mark.parametrize(
    ("given", "changes", "named"),
    [
        ({"a": 1}, {"required": tuple("abcdef")}, r" other, .* b, c, d, e, \.\.\.$"),
        ({}, {"absent": {"optim.lr": 1e-3}}, "not hold group, "),
        ({}, {"refuse": lambda get: f"group={get('group')} makes videos"}, "^group=16 makes videos$"),
        ({"group": 4}, {"only": {"group": (None, 8)}}, "^group=4 .* 8$"),
    ],
)
def test_a_configuration_of_no_run_of_the_other_trainer_is_refused(given, changes, named):
    with pytest.raises(ConfigError, match=named):
        translate_values(given, table(**changes))


@pytest.mark.parametrize(
    ("decay", "updates", "found"), [(0.9, 8, 0.986916), (0.9, 2, 0.948683), (1 - 1e-9, 8, 0.999999)]
)
def test_the_decay_of_one_update(decay, updates, found):
    """After all updates, as much of the old average is left."""
    assert decay_of_one(decay, updates) == found
    if found < 0.999:
        assert decay_of_one(decay, updates) ** updates == pytest.approx(decay, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("$N", "$N"),
        (["a", "${oc.env:HOME}/b"], "${oc.env:HOME}/b"),
        ({"a": "${missing}"}, "${missing}"),
        ("???", "???"),
    ],
)
def test_a_value_that_is_not_resolved_is_refused_where_it_is_needed(value, named):
    with pytest.raises(ConfigError, match=f"^group={re.escape(named)} .* group=VALUE$"):
        translate_values({"group": value}, table())
    found = translate_values({"optim": {"eps": "$N"}}, table())
    assert found.left == {"another optimizer": ["optim.eps=$N"]}


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (int, 2.0, 2),
        (float, 2, 2.0),
        (bool, 1, True),
        (list, "wandb", ["wandb"]),
        (str, "a", "a"),
        (int | None, None, None),
    ],
)
def test_a_value_is_of_the_type_that_is_asked_for(kind, value, found):
    made = Given({"a": {"b": value}}, {}, "other")("a.b", kind)
    assert (made, type(made)) == (found, type(found))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"group": "abc"}, "group='abc' .* whole number"),
        ({"group": 2.5}, "group=2.5 .* whole number"),
        ({"group": True}, "group=True .* whole number"),
        ({"optim": {"lr": math.nan}}, "optim.lr=nan .* finite number"),
        ({"optim": {"lr": math.inf}}, "optim.lr=inf .* finite number"),
        ({"optim": {"lr": -math.inf}}, "optim.lr=-inf .* finite number"),
    ],
)
def test_a_value_of_another_type_or_one_that_is_not_finite_is_refused(given, named):
    with pytest.raises(ConfigError, match=f"^{named}$"):
        translate_values(given, table())


def test_names_of_dtypes():
    get = Given({"a": "bf16", "b": None, "c": "torch.float16", "d": "int8"}, {}, "other")
    assert [dtype_of(get, key) for key in "abc"] == ["bfloat16", "float32", "float16"]
    with pytest.raises(ConfigError, match="^d='int8' .* no, fp32"):
        dtype_of(get, "d")
