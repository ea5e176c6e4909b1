"""The documentation says what is so: commands, examples, JSON fields."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from forerun.cli import commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [
    (page.name, line)
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("forerun ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_shown_parses(page, line):
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    command = commands()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    command.make_context("forerun", words)


def test_commands_were_found():
    assert len(COMMANDS) > 10


def test_the_first_example_is_a_good_one(forerun):
    """It ends by itself, with text that does not turn in circles, and drafts pay."""
    [line, *_] = [line for page, line in COMMANDS if page == "README.md"]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    how = ["--controller", "auto(cost=5)", "--device", "cpu", "--json"]  # whatever the clock says
    [done] = forerun(*words[1:-1], *how).json["completions"]
    assert done["finish_reason"] == "eos"
    assert done["stats"]["block_efficiency"] > 3
    grams = [tuple(done["tokens"][i : i + 6]) for i in range(len(done["tokens"]) - 5)]
    assert max(map(grams.count, grams)) == 1


def test_python_examples_run():
    result = doctest.testfile(
        str(ROOT / "docs" / "python.md"),
        module_relative=False,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.attempted > 10
    assert result.failed == 0


def test_json_fields_are_described(generate):
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    document = generate("Hello", "--max-new-tokens", "4", "--json", "--compare").json
    [completion] = document["completions"]
    names = [*document, *completion, *completion["rounds"][0], *completion["stats"]]
    names += [*document["compare"], *document["compare"]["plain"], *document["settings"]]
    names += document["versions"]
    assert [n for n in names if f"`{n}`" not in page and f'"{n}"' not in page] == []


def test_no_row_stands_apart_from_its_table():
    """Cells behind an empty line begin a table: a rule follows them, or they are shown as text."""
    apart = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for before, line, after in zip(lines[:-1], lines[1:], [*lines[2:], ""], strict=True):
            if not before and line.startswith("| ") and not after.startswith("|--"):
                apart.append((page.name, line[:60]))
    assert apart == []
