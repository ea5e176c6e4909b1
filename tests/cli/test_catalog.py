"""`list`, `info`, `cite`, `zoo card`, `--version`, `--help`."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command

from forerun import __version__
from forerun.cli import COMMANDS, app
from forerun.cli.parts import KINDS, MOVED, card_lines, cards
from forerun.model import DEFAULT_RULE, Model

METHODS = files("forerun") / "methods"


def test_version_and_help(forerun):
    assert forerun("--version").out == f"forerun {__version__}\n"
    for argv in ([], ["--help"], ["generate", "--help"], ["zoo"]):
        result = forerun(*argv)
        assert result.code == 0
        assert "Usage: forerun" in result.out


def test_help_needs_no_command():
    code = (
        "import sys, forerun.cli\n"
        "code = forerun.cli.main(['--help'])\n"
        "print(code, sorted(m for m in sys.modules if m.startswith('forerun')), file=sys.stderr)\n"
        "print({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'numpy', 'transformers', 'rich', 'recipes', 'benchmarks'}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, heavy = done.stderr.splitlines()
    assert loaded == (
        "0 ['forerun', 'forerun.cli', 'forerun.cli.shared', 'forerun.cli.shared.guard', "
        "'forerun.errors']"
    )
    assert heavy == "set()"


def test_lines_of_help_begin_the_commands_own():
    group = get_command(app)
    for panel in COMMANDS.values():
        for name, (_, line) in panel.items():
            own = group.commands[name].help.split("\n\n")[0]
            assert " ".join(own.split()).startswith(line.removesuffix(".")), name
            assert f"  {name} " in group.get_help(Context(group))
    assert set(group.commands) == {name for panel in COMMANDS.values() for name in panel}


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
    kept = {True: "\nlossless: ", False: "\nlossy: ", None: ""}[card.lossless]
    assert kept in out
    cited = forerun("cite", card.name)
    assert cited.code == 0
    if card.paper:
        assert cited.out.startswith("@")
    else:
        assert cited.out == ""
        assert "no paper" in cited.err


@pytest.mark.parametrize("kind", ["controllers", "rules"])
def test_methods_are_described_in_files_and_not_in_docstrings(kind):
    prose = {path.name[:-3]: path.read_text("utf-8") for path in (METHODS / kind).iterdir()}
    parts = {c.name: c for c in cards(kind) if c.cls.__module__.startswith("forerun.")}
    assert set(prose) == set(parts)
    sources = [s for s in (files("forerun") / kind).iterdir() if s.name.endswith(".py")]
    named = [s for s in sources if s.read_text("utf-8").startswith('"""`')]
    assert len(named) == len([c for c in parts.values() if f".{kind}." in c.cls.__module__])
    for name, card in parts.items():
        assert prose[name].startswith("*Helps*"), name
        assert prose[name].rstrip() in card.doc, name
        assert "*Helps*" not in card.cls.__doc__, name


def test_the_documentation_says_which_rule_is_the_default():
    docs = {card.name: " ".join(card.doc.split()) for card in cards("rules")}
    assert [name for name, doc in docs.items() if "it is the default" in doc] == [DEFAULT_RULE]
    assert f"`{DEFAULT_RULE}`, the default" in docs["standard"]
    assert f"or else `{DEFAULT_RULE}`" in Model.stream.__doc__
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"| `{DEFAULT_RULE}` | always; the default" in page


def test_unknown_names_are_told_once(forerun):
    known = forerun("info", "nosuch").error.partition("known: ")[2].split(", ")
    assert len(known) == len(set(known)) > 20


def test_a_name_of_two_kinds_shows_both(forerun):
    out = forerun("info", "cm-asd").out
    assert out.startswith("cm-asd is a controller and a rule")
    assert "cm-asd  (controller)" in out
    assert "cm-asd  (rule)" in out
    assert forerun("cite", "cm-asd").out.count("@") == 1


def test_list_says_what_is_lossy(forerun):
    lines = forerun("list", "rules").out.splitlines()[2:]
    assert {line.split()[0]: line.split()[1] for line in lines} == {
        card.name: "lossless" if card.lossless else "lossy" for card in cards("rules")
    }


@pytest.mark.parametrize("card", [c for kind in KINDS for c in cards(kind)], ids=lambda c: c.name)
def test_cards_wrap_between_words(card):
    whole = card_lines(card)
    lines = card_lines(card, 80)
    assert max(len(line) for line in lines) <= 80
    words = [[word for line in text for word in line.plain.split()] for text in (whole, lines)]
    assert words[0] == words[1]
    blank = [sum(not line for line in text) for text in (whole, lines)]
    assert blank[0] == blank[1], "paragraphs stay apart"


def test_cite_takes_specs_and_repeats_nothing(forerun):
    out = forerun("cite", "bounded(gammatune+(eta=0.5))", "fixed", "standard", "model").out
    assert out.count("leviathan2023") == 1
    assert "gammatune" in out
    assert forerun("cite", "saxena2023").out.startswith("@misc")


def test_unknown_names(forerun):
    assert "did you mean 'lookup'" in forerun("info", "lokup").error
    result = forerun("cite", "gamatune")
    assert (result.code, "did you mean 'gammatune'" in result.error) == (2, True)


def test_commands_of_the_recipe_name_their_new_place(forerun):
    from recipes.__main__ import app as recipe

    names = {c.name or c.callback.__name__ for c in recipe.registered_commands}
    assert set(MOVED) <= names
    for name in MOVED:
        result = forerun("zoo", name, "--data", "somewhere")
        assert (result.code, f"python -m recipes {name}" in result.error) == (2, True)


def test_model_card(forerun, monkeypatch):
    monkeypatch.setattr(sys.modules["forerun.cli.parts"], "model_card", lambda: "# The pair\n")
    assert forerun("zoo", "card").out == "# The pair\n"
