"""What reaches a terminal, and what reaches a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from forerun.cli.shared import console


def terminal(**options) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", markup=False,
        emoji=False, highlight=False, width=20, **options,
    )  # fmt: skip


def test_control_characters_are_shown_not_obeyed():
    text = "a\x1b[2J\x07\r\x9b31m\u202eb\n\tc"
    assert console.clean(text) == "a␛[2J␇␍�31m�b\n\tc"
    assert console.one_line("a\nb\tc") == "a⏎b→c"


def shown(*pieces: str) -> str:
    out = terminal()
    writer = console.Writer(out)
    for piece in pieces:
        writer.write(piece, "")
    writer.flush()
    return out.file.getvalue()


def test_markup_and_emoji_are_text():
    out = terminal()
    writer = console.Writer(out)
    writer.write("[bold]x[/]:smile:\x1b[31m", "green")
    writer.flush()
    assert out.file.getvalue() == "\x1b[32m[bold]x[/]:smile:␛[31m\x1b[0m"


@pytest.mark.parametrize(
    "pieces", [[" leading"], ["trailing "], ["\n"], ["a\nb"], ["\n\n"], ["x" * 50], ["a ", " b"]]
)
def test_pieces_are_not_trimmed(pieces):
    assert shown(*pieces) == "".join(pieces)


def test_lines_break_between_words():
    assert shown("twelve letters", " and", " mo", "re") == "twelve letters and \nmore"
    assert shown("a" * 20, " b") == "a" * 20 + "\nb"
    assert shown("日本" * 4, " 日本" * 2) == "日本" * 4 + " \n日本 日本"


def test_pipe_gets_the_text_as_it_is(capsys):
    console.Writer(console.stdout()).write("raw \x1b[31m [bold]\n")
    assert capsys.readouterr().out == "raw \x1b[31m [bold]\n"


def test_colours_can_be_switched_off(monkeypatch):
    assert console.coloured(terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not console.coloured(terminal())
    assert not console.coloured(Console(file=io.StringIO()))


def test_legend_names_every_origin():
    from forerun.engine.results import Origin

    assert {o.value for o in Origin} == set(console.ORIGINS)
    for _, meaning in console.ORIGINS.values():
        assert meaning in console.legend().plain
