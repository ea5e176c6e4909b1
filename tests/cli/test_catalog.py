"""`list`, `info`, `cite`, `zoo card`, `--version`, `--help`."""

from __future__ import annotations

import sys

import pytest

from forerun import __version__
from forerun.cli.catalog import KINDS, cards


def test_version_and_help(forerun):
    assert forerun("--version").out == f"forerun {__version__}\n"
    for argv in ([], ["--help"], ["generate", "--help"], ["zoo"]):
        result = forerun(*argv)
        assert result.code == 0
        assert "Usage: forerun" in result.out


@pytest.mark.parametrize("kind", KINDS)
def test_list_has_one_line_each(forerun, kind):
    lines = forerun("list", kind).out.splitlines()
    names = [card.name for card in cards(kind)]
    assert [line.split()[0] for line in lines[2:]] == names
    for line, card in zip(lines[2:], cards(kind), strict=True):
        assert card.summary in line
        assert card.signature in line
        assert line == line.rstrip()


def test_list_all_and_models(forerun):
    out = forerun("list").out
    for word in (*KINDS, "models", "(shipped target)", "llama"):
        assert word in out
    assert "did you mean 'rules'" in forerun("list", "rule").error


@pytest.mark.parametrize("card", [c for kind in KINDS for c in cards(kind)], ids=lambda c: c.name)
def test_every_card_is_complete(forerun, card):
    assert card.summary
    assert "Args:" in card.doc or not card.settings
    out = forerun("info", card.name).out
    for name, _ in card.settings:
        assert name in out
    assert ("lossless" in out) or card.kind != "rules"
    cited = forerun("cite", card.name)
    assert cited.code == 0
    if card.paper:
        assert cited.out.startswith("@")
    else:
        assert cited.out == ""
        assert "no paper" in cited.err


def test_cite_takes_specs_and_repeats_nothing(forerun):
    out = forerun("cite", "bounded(gammatune+(eta=0.5))", "fixed", "standard", "model").out
    assert out.count("leviathan2023") == 1
    assert "gammatune" in out
    assert forerun("cite", "saxena2023").out.startswith("@misc")


def test_unknown_names(forerun):
    assert "did you mean 'lookup'" in forerun("info", "lokup").error
    result = forerun("cite", "gamatune")
    assert (result.code, "did you mean 'gammatune'" in result.error) == (2, True)


def test_model_card(forerun, monkeypatch):
    monkeypatch.setattr(sys.modules["forerun.cli.zoo"], "model_card", lambda: "# The pair\n")
    assert forerun("zoo", "card").out == "# The pair\n"
