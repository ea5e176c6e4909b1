"""Where things are printed and in which colours.

Text goes to stdout, everything said about it to stderr, so a pipe gets the text alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {
    "draft": "green",
    "correction": "bold yellow",
    "bonus": "cyan",
    "plain": "",
    "grammar": "magenta",
}
"""Who wrote a token (`engine.results.Origin`) and its colour."""

MEANINGS = {
    "draft": "drafted and accepted",
    "correction": "target's correction",
    "bonus": "target's bonus token",
    "plain": "target alone",
    "grammar": "forced by a constraint",
}

_SHOWN: dict[int, int | str] = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_SHOWN |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def clean(text: str) -> str:
    """Text that a terminal only shows: control characters become visible symbols.

    >>> clean("a\\x1b[31mb")
    'a␛[31mb'
    """
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    """`clean` text with line breaks shown as ⏎."""
    return clean(text.replace("\n", "⏎").replace("\t", "→"))


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "round"), count(1200, "token")
    ('1 round', '1,200 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def stdout() -> Console:
    """A console for results."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """A console for everything else."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def coloured(console: Console) -> bool:
    """Whether colours reach the reader."""
    return console.is_terminal and not console.no_color and console.color_system is not None


class Writer:
    """Prints model text piece by piece.

    To a terminal: cleaned, coloured, and wrapped between words, for which the newest word waits
    until it is complete. To anything else: the text as it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._word: list[tuple[str, str]] = []
        self._column = 0

    def write(self, text: str, style: str = "") -> None:
        """Print a piece of text, without a line break of its own."""
        if not self._console.is_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        for part in re.split(r"([ \n])", clean(text.expandtabs(4))):
            if part in (" ", "\n"):
                self.flush()
                self._space(part)
            elif part:
                self._word.append((part, style))

    def flush(self) -> None:
        """Print the word that waits."""
        word, self._word = Text.assemble(*self._word), []
        if not word:
            return
        if self._column and self._column + word.cell_len > self._console.width:
            self._put("\n")
            self._column = 0
        self._put(word)
        self._column += word.cell_len

    def _space(self, part: str) -> None:
        full = self._column + 1 >= self._console.width
        self._put("\n" if full else part)
        self._column = 0 if full or part == "\n" else self._column + 1

    def _put(self, text: str | Text) -> None:
        self._console.print(text, end="", soft_wrap=True)
        self._console.file.flush()


def note(console: Console, text: str | Text) -> None:
    """Print a line for people; it wraps on terminals only."""
    console.print(text, soft_wrap=not console.is_terminal)


def legend() -> Text:
    """One line that says what the colours mean."""
    line = Text("colours: ", "dim")
    for i, (origin, meaning) in enumerate(MEANINGS.items()):
        line.append(" · " if i else "", "dim").append(meaning, STYLES[origin])
    return line


def table(*left: str, right: Sequence[str] = (), no_wrap: bool = False) -> Table:
    """A table without lines: columns of words, then of numbers (kept on one line if `no_wrap`)."""
    made = Table(box=None, pad_edge=False, show_edge=False)
    for name in left:
        made.add_column(name, header_style="dim", overflow="fold", min_width=len(name))
    for name in right:
        made.add_column(name, header_style="dim", justify="right", no_wrap=no_wrap)
    return made


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, on terminals only, that is told what is being done."""
    console = stderr()
    if not console.is_terminal:
        yield lambda message: None
        return
    with console.status(message, spinner="dots") as shown:
        yield shown.update
