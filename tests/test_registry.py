"""Names and settings in text form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cli.parts import BIBTEX, Card
from forerun.controllers import CONTROLLERS
from forerun.drafters import DRAFTERS
from forerun.errors import SettingError, UnknownNameError
from forerun.registry import Registry, Spec, papers_of, parse
from forerun.rules import RULES

NAMES = st.from_regex(r"[A-Za-z_][\w.+/-]{0,8}", fullmatch=True).filter(
    lambda n: n.lower() not in {"true", "false", "none"} and n.isascii()
)
KEYS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
SCALARS = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
SPECS = st.recursive(
    st.builds(Spec, NAMES),
    lambda inner: st.builds(
        Spec,
        NAMES,
        st.lists(SCALARS | inner, max_size=2).map(tuple),
        st.dictionaries(KEYS, SCALARS | inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(SPECS)
def test_spec_text_round_trip(spec):
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("gammatune+", Spec("gammatune+")),
        ("fixed()", Spec("fixed")),
        ("fixed(3)", Spec("fixed", (3,))),
        (" gammatune( eta = .3 , delta=2 ) ", Spec("gammatune", (), {"eta": 0.3, "delta": 2})),
        ("x(a=-1e-3,b=true,c=none)", Spec("x", (), {"a": -0.001, "b": True, "c": None})),
        ("x('it''s'", None),
        ("bounded(fixed(2),high=8)", Spec("bounded", (Spec("fixed", (2,)),), {"high": 8})),
        ("org/model-0.5b", Spec("org/model-0.5b")),
        ("x(007, 1., +2)", Spec("x", (7, 1.0, 2))),
        (r"x('a\n\'\\\x41\u00e4\U0001f600\q')", Spec("x", ("a\n'\\A\u00e4\U0001f600q",))),
    ],
)
def test_parse(text, spec):
    if spec is None:
        with pytest.raises(SettingError):
            parse(text)
    else:
        assert parse(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "(", "3", "fixed(", "fixed(3", "fixed(3))", "fixed(a=)", "fixed(a=1,2)"),
        *("f(a=1,a=2)", "f(,)", "f(1 2)", "f;g", "f(a==1)", "f(1.2.3)"),
    ],
)
def test_unreadable_text_is_an_error(text):
    with pytest.raises(SettingError):
        parse(text)


def test_unknown_names_and_keys_get_a_hint():
    with pytest.raises(UnknownNameError, match="controller 'gamatune'; did you mean 'gammatune'"):
        CONTROLLERS.make("gamatune")
    with pytest.raises(UnknownNameError, match="did you mean 'eta'"):
        CONTROLLERS.make("gammatune(etaa=1)")
    with pytest.raises(UnknownNameError, match="did you mean 'fixed'"):
        CONTROLLERS.make("bounded(fixe)")
    with pytest.raises(UnknownNameError, match=r"known: block, .*typical"):
        RULES.make("zzz")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bounded", "needs 'inner'"),
        ("fixed(1,2,3)", "at most 2 settings"),
        ("fixed(1,length=2)", "'length' twice"),
        (5, "must be text or an instance of Controller, got 5"),
        (None, "must be text or an instance of Controller, got None"),
    ],
)
def test_bad_use_is_an_error(spec, message):
    with pytest.raises(SettingError, match=message):
        CONTROLLERS.make(spec)


def test_settings_without_names_are_those_that_python_takes_without():
    """CM-ASD's weights are named in both."""
    made = CONTROLLERS.make("cm-asd(0.5, 2)")
    assert made == type(made)(0.5, 2) == type(made)(alpha=0.5, low=2)
    with pytest.raises(SettingError, match="at most 4 settings without their names"):
        CONTROLLERS.make("cm-asd(0.5,2,9,true,0.3)")


def test_a_part_is_not_taken_for_another_kind():
    with pytest.raises(SettingError, match="must be text or an instance of AcceptanceRule"):
        RULES.make(CONTROLLERS.make("fixed"))


def test_instances_and_specs_pass():
    controller = CONTROLLERS.make("fixed(3)")
    assert CONTROLLERS.make(controller) is controller
    assert CONTROLLERS.make(Spec("fixed", (3,))) == controller
    assert "fixed" in CONTROLLERS
    assert "nope" not in CONTROLLERS


def test_text_names_only_what_differs():
    text = CONTROLLERS.text(CONTROLLERS.make("bounded(gammatune(eta=0.3, delta=3), 1, 8)"))
    assert text == "bounded(inner=gammatune(delta=3),low=1,high=8)"
    assert CONTROLLERS.text(CONTROLLERS.make("gammatune(early_stop=skip)")) == (
        "gammatune(early_stop='skip')"
    )


@dataclass(frozen=True)
class Wordy:
    """A part with a text setting."""

    path: str = "a"
    count: int = 0


class Entry:
    """What `importlib.metadata.entry_points` returns, one entry."""

    def __init__(self, name, part):
        self.name, self._part = name, part

    def load(self):
        return self._part


def test_plugins_by_entry_point(monkeypatch):
    seen = []

    def entry_points(group):
        seen.append(group)
        return [Entry("wordy", Wordy), Entry("fixed", Wordy)]

    monkeypatch.setattr("forerun.registry.entry_points", entry_points)
    registry = Registry(
        "thing", "forerun.things", {"fixed": "forerun.controllers.fixed:FixedLength"}
    )
    assert registry.names() == ["fixed", "wordy"]
    assert registry.load("fixed") is not Wordy  # ours cannot be replaced by a plugin
    assert registry.make("wordy(path=some/where-1.0,count=2)") == Wordy("some/where-1.0", 2)
    assert registry.make(registry.text(Wordy("x y"))) == Wordy("x y")
    assert registry.text(Wordy()) == "wordy"
    assert seen == ["forerun.things"]


def test_a_package_of_somebodys_own_says_what_its_methods_are():
    class Own(Wordy):
        """Count words, after Nobody et al. 2031 (Words) [nobody2031], §1."""

        summary, bibtex = "count words", "@misc{nobody2031}"

    card = Card("controllers", "own", Own)
    assert (card.summary, card.bibtex) == ("count words", "@misc{nobody2031}")
    assert card.paper == "Nobody et al. 2031 (Words)"
    plain = Card("controllers", "wordy", Wordy)
    assert (plain.summary, plain.paper, plain.bibtex) == ("Names and settings in text form", "", "")


def test_text_of_a_part_nobody_registered():
    assert CONTROLLERS.text(Wordy()) == repr(Wordy())


def test_every_citation_is_an_entry_and_every_entry_is_cited():
    of_kinds = CONTROLLERS, RULES, DRAFTERS
    classes = [registry.load(name) for registry in of_kinds for name in registry.names()]
    assert {key for cls in classes for key in papers_of(cls)} == BIBTEX.keys()
    for key, entry in BIBTEX.items():
        assert entry.startswith("@"), key
        assert entry.count("{") == entry.count("}")
        assert entry.endswith("}\n")
