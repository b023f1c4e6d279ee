"""Tables of keys."""

import math

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.flow_factory import TABLE as FLOW_FACTORY
from flowcorr.translate.flow_grpo import TABLE as FLOW_GRPO
from flowcorr.translate.table import Row, Table, check_required, decay_of_one, same, translate_values
from flowcorr.translate.unread import Unread
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI
from flowcorr.translate.verl_omni_defaults import OF_A_FILE


@pytest.mark.parametrize("table", [VERL_OMNI, FLOW_GRPO, FLOW_FACTORY])
def test_each_row_has_the_defaults_that_it_reads(table):
    assert {source for row in table.rows for source in row.sources} <= table.defaults.keys()
    assert {*table.kinds, *table.required} <= table.defaults.keys()


def test_the_keys_of_a_file_are_those_of_the_table():
    assert {*OF_A_FILE} <= VERL_OMNI.defaults.keys()


def table(**changes):
    rows = (
        Row(key="actor.lr", sources=("optim.lr",), value=lambda get: get("optim.lr")),
        Row(key="rollout.n", sources=("group",), value=lambda get: get("group"), note="images of a prompt"),
        Row(key="actor.kl_coef", value=lambda get: 0.0),
    )
    fields = {
        "name": "other",
        "defaults": {"optim.lr": 1e-3, "group": 16},
        "kinds": {},
        "required": (),
        "sections": (),
        "rows": rows,
        "no_place": {"optim.*": "another optimizer"},
        "differences": ("the std",),
        "refuse": lambda get: "",
    }
    return Table(**{**fields, **changes})


def test_a_line_says_where_its_value_is_from():
    found = translate_values({"group": 8, "optim.eps": 1e-8, "unheard_of": 1}, table())
    lines = {key: (line.value, line.comment) for key, line in found.lines.items()}
    assert lines["rollout.n"] == (8, "group (images of a prompt)")
    assert lines["actor.lr"] == (1e-3, "other's default of optim.lr; default here: 0.0003")
    assert "actor.kl_coef" not in lines  # the default here
    assert found.no_place == {"another optimizer": ["optim.eps=1e-08"]}
    assert (found.unknown, found.no_line) == (["unheard_of=1"], [])
    assert found.sources == {"group", "optim.lr"}


def test_a_key_that_makes_no_line_is_listed():
    rows = (Row(key="rollout.n", sources=("group",), value=lambda get: None),)
    assert translate_values({"group": 8}, table(rows=rows)).no_line == ["group=8"]
    assert translate_values({}, table(rows=rows)).no_line == []


def test_a_note_may_depend_on_the_values():
    rows = (same("group", "rollout.n", lambda get: f"{get('group')} images"),)
    assert translate_values({"group": 8}, table(rows=rows)).lines["rollout.n"].comment == "group (8 images)"


def test_a_configuration_of_something_else_lacks_keys():
    check_required({"a": 1}, ("a",), "other")
    with pytest.raises(
        ConfigError, match=r"^it is no configuration of other, which would hold b, c, d, e, \.\.\.$"
    ):
        check_required({"a": 1}, tuple("abcdef"), "other")
    with pytest.raises(ConfigError, match="^it is no configuration of other, which would hold group$"):
        translate_values({}, table(required=("group",)))


@pytest.mark.parametrize(
    ("decay", "updates", "found"), [(0.9, 8, 0.986916), (0.9, 2, 0.948683), (1 - 1e-9, 8, 0.999999)]
)
def test_the_decay_of_one_update(decay, updates, found):
    """After all updates, as much of the old average is left."""
    assert decay_of_one(decay, updates) == found
    if found < 0.999:
        assert decay_of_one(decay, updates) ** updates == pytest.approx(decay, rel=1e-5)


def test_a_value_that_is_unread_is_refused_where_it_is_needed():
    lost = Unread("$N", "line 2: the script does not assign $N")
    with pytest.raises(ConfigError, match=r"^group is not known: line 2: the script does not assign \$N$"):
        translate_values({"group": [lost]}, table())
    assert translate_values({"optim.eps": lost}, table()).no_place == {"another optimizer": ["optim.eps=$N"]}


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (int, 2.0, 2),
        (float, 2, 2.0),
        (bool, 1, True),
        (list, (1, 2), [1, 2]),
        (list, "[1, 2]", [1, 2]),
        (list, "wandb", ["wandb"]),
        (str, "a", "a"),
    ],
)
def test_a_value_is_of_the_type_of_its_key(kind, value, found):
    rows = (Row(key="rollout.n", sources=("a",), value=lambda get: get("a")),)
    made = translate_values({"a": value}, table(rows=rows, defaults={"a": None}, kinds={"a": kind}))
    assert (made.lines["rollout.n"].value, type(made.lines["rollout.n"].value)) == (found, kind)
    assert (
        translate_values({"a": None}, table(rows=rows, defaults={"a": None}, kinds={"a": kind})).lines == {}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [("abc", "group='abc' must be a whole number"), (2.5, "group=2.5 must be"), (None, "group=None must be")],
)
def test_a_value_of_another_type_is_refused(value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        translate_values({"group": value}, table())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(ConfigError, match=f"^optim.lr={value} must be a finite number$"):
        translate_values({"optim.lr": value}, table())


def test_of_two_rows_of_a_line_only_the_one_that_makes_it_has_sources():
    rows = (
        Row(key="rollout.n", sources=("group",), value=lambda get: None),
        Row(key="rollout.n", sources=("optim.lr",), value=lambda get: 8),
    )
    found = translate_values({"group": 4, "optim.lr": 0.1}, table(rows=rows))
    assert (found.lines["rollout.n"].comment, found.no_line) == ("optim.lr", ["group=4"])


def test_a_run_that_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="it makes videos"):
        translate_values({}, table(refuse=lambda get: "it makes videos"))
