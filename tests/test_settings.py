"""The settings file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import SettingError, UnknownNameError
from forerun.settings import Settings, resolve

FULL = Settings(
    controller="gammatune(eta=0.2)",
    rule="typical",
    draft="specbound(threshold=0.8,exits='/heads')",
    about={"by": "forerun tune", "speedup": 1.5},
)
specs = st.sampled_from([None, "fixed", "fixed(3)", "bounded(svip(keep=False),high=4)"])
texts = st.none() | st.text(min_size=1)


@given(
    specs, st.sampled_from([None, "exact", "standard"]), texts, st.dictionaries(st.text(), texts)
)
@settings(max_examples=50, deadline=None)
def test_round_trip(tmp_path_factory, controller, rule, draft, about):
    path = tmp_path_factory.mktemp("settings") / "settings.json"
    made = Settings(controller, rule, draft, about=about)
    made.write(path)
    assert Settings.read(path) == made


def test_the_file_is_as_documented(tmp_path):
    FULL.write(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == {
        "schema": 1,
        "controller": "gammatune(eta=0.2)",
        "rule": "typical",
        "draft": "specbound(threshold=0.8,exits='/heads')",
        "about": {"by": "forerun tune", "speedup": 1.5},
    }
    assert Settings.read(tmp_path / "s.json") == FULL


def test_only_what_matters_need_be_there(tmp_path):
    (tmp_path / "s.json").write_text('{"schema": 1, "controller": "svip"}')
    assert Settings.read(tmp_path / "s.json") == Settings(controller="svip")


def test_exit_heads_go_into_the_drafter():
    from forerun.drafters import DRAFTERS

    drafter = DRAFTERS.make(FULL.draft)
    assert (drafter.threshold, drafter.exits) == (0.8, "/heads")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "controler": "svip"}', "'controler'; did you mean 'controller'"),
        ('{"schema": 1, "temperature": 1}', "unknown key in .*s.json 'temperature'; known: about"),
        ('{"schema": 2}', "schema 2 and this forerun reads 1"),
        ('{"controller": "svip"}', 'needs "schema": 1'),
        ("[1]", "not a settings file"),
        ("{", "not a settings file"),
        ('{"schema": 1, "controller": "gamatune"}', "s.json: .*did you mean 'gammatune'"),
        ('{"schema": 1, "controller": "gammatune(eta=7)"}', "s.json: eta must be"),
        ('{"schema": 1, "rule": "exat"}', "s.json: .*did you mean 'exact'"),
        ('{"schema": 1, "controller": 5}', "controller must be text or null, got 5"),
        ('{"schema": 1, "draft": ""}', "draft must be text or null, got ''"),
        ('{"schema": 1, "exits": "x"}', "unknown key in .*s.json 'exits'"),
        ('{"schema": 1, "about": "me"}', "about must be an object"),
    ],
)
def test_mistakes_are_told(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(SettingError, match=message):
        Settings.read(tmp_path / "s.json")


def test_a_wrong_name_keeps_its_kind(tmp_path):
    (tmp_path / "s.json").write_text('{"schema": 1, "controller": "gamatune"}')
    with pytest.raises(UnknownNameError):
        Settings.read(tmp_path / "s.json")


def test_bytes_that_are_no_text_are_told(tmp_path):
    (tmp_path / "s.json").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not a settings file"):
        Settings.read(tmp_path / "s.json")
    with pytest.raises(OSError, match="No such file"):
        Settings.read(tmp_path / "none.json")


def test_what_is_given_wins(tmp_path):
    FULL.write(tmp_path / "s.json")
    path = tmp_path / "s.json"
    assert resolve(path) == resolve(str(path)) == resolve(FULL) == FULL
    assert resolve() == Settings()
    assert resolve(path, controller="svip").controller == "svip"
    assert resolve(path, controller="svip").rule == "typical"
    assert resolve(path, rule="exact").rule == "exact"
    assert resolve(path, draft="lookup").draft == "lookup"
    assert resolve(None, draft="lookup").draft == "lookup"
    with pytest.raises(SettingError, match="controller must be text or null, got ''"):
        resolve(path, controller="")
