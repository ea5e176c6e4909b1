"""Where things are printed and in which colours.

Text goes to stdout, messages go to stderr, so a pipe gets the text alone. Progress bars are for
terminals only, and gone when the work is done.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

ORIGINS = {
    "draft": ("green", "drafted and accepted"),
    "correction": ("bold yellow", "target's correction"),
    "bonus": ("cyan", "target's bonus token"),
    "plain": ("", "target alone"),
    "grammar": ("magenta", "forced by a constraint"),
}
"""Who wrote a token (`engine.results.Origin`), its colour, and what that means."""
STYLES = {origin: style for origin, (style, _) in ORIGINS.items()}

_SHOWN: dict[int, int | str] = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_SHOWN |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def clean(text: str) -> str:
    """Text without control characters: they become visible symbols.

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
    """Prints model text piece by piece. To a terminal: cleaned, coloured, and wrapped between
    words, for which the newest word waits until it is complete. To anything else: the text as it
    is."""

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


def note(text: str | Text) -> None:
    """Print a line for people on stdout; it wraps on terminals only."""
    _line(stdout(), text)


def remark(text: str | Text) -> None:
    """Print a line for people on stderr, likewise."""
    _line(stderr(), text)


def _line(console: Console, text: str | Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


def legend() -> Text:
    """One line with the meanings of the colours."""
    line = Text("colours: ", "dim")
    for i, (style, meaning) in enumerate(ORIGINS.values()):
        line.append(" · " if i else "", "dim").append(meaning, style)
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
    """A spinner on stderr, on terminals only, that shows the current phase."""
    console = stderr()
    if not console.is_terminal:
        yield lambda message: None
        return
    with console.status(message, spinner="dots") as shown:
        yield shown.update


Tell = Callable[..., None]
"""Reports the name before the bar, how much of a task is done, and the total if it is not known."""


@contextmanager
def progress(
    name: str,
    total: float | None = None,
    unit: str = "",
    alone: bool = False,
    console: Console | None = None,
) -> Iterator[Tell]:
    """A bar, and one more for every other name that is reported, or instead if `alone`; `total` is
    how much there is where no total is reported. Without a unit, percentages are shown. While it
    stands, nothing but its `console` may write to the terminal; None is one of stderr."""
    from rich import progress as rich

    console = console or stderr()
    counted = (rich.MofNCompleteColumn(), rich.TextColumn(unit)) if unit else ()
    share = () if unit else (rich.TaskProgressColumn(),)
    bars = rich.Progress(
        rich.TextColumn("{task.description}"),
        *counted,
        rich.BarColumn(),
        *share,
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,  # piped text must stay in the pipe
    )
    tasks = {name: bars.add_task(name, total=total)}
    first = total

    def tell(name: str, done: float, total: float | None = None) -> None:
        most = first if total is None else total
        if name not in tasks:
            while alone and tasks:
                bars.remove_task(tasks.popitem()[1])
            tasks[name] = bars.add_task(name, total=most)
        done = done if most is None else min(done, most)
        bars.update(tasks[name], completed=done, total=most)

    with bars:
        yield tell


def collected(run: Iterable[T], name: str, total: int, unit: str) -> tuple[list[T], bool]:
    """What comes of a run, under a bar, and whether an interrupt ended it."""
    done: list[T] = []
    try:
        with progress(name, total, unit) as tell:
            for one in run:
                done.append(one)
                tell(name, len(done))
    except KeyboardInterrupt:
        remark(f"interrupted after {len(done)} of {total} {unit}")
        return done, True
    return done, False
