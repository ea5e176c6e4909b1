"""Progress bars: on stderr, on terminals only, gone when the work is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from forerun.cli.shared.console import note, stderr

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")


class Tell(Protocol):
    """Reports how much of a task is done, and the total if it is not known yet."""

    def __call__(self, name: str, done: float, total: float | None = None) -> None:
        """The name stands before the bar."""


def make(*columns: ProgressColumn) -> Progress:
    """Bars with these columns."""
    from rich.progress import Progress

    console = stderr()
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,  # piped text must stay in the pipe
    )


@contextmanager
def progress(
    name: str, total: float | None = None, unit: str = "", alone: bool = False
) -> Iterator[Tell]:
    """A bar, and one more for every other name that is reported.

    Args:
        name: of the first bar.
        total: how much there is of what has no total of its own.
        unit: what is counted; without one, percentages are shown.
        alone: a new name takes the place of the one before.
    """
    from rich import progress as rich

    counted = (rich.MofNCompleteColumn(), rich.TextColumn(unit)) if unit else ()
    share = () if unit else (rich.TaskProgressColumn(),)
    bars = make(
        rich.TextColumn("{task.description}"),
        *counted,
        rich.BarColumn(),
        *share,
        rich.TimeRemainingColumn(),
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
        note(stderr(), "interrupted; this is what was compared")
        return done, True
    return done, False


class PromptBar:
    """Counts finished prompts."""

    def __init__(self, total: int, done: int = 0) -> None:
        from rich import progress as rich

        self._bar = make(
            rich.TextColumn("{task.completed}/{task.total} prompts"),
            rich.BarColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[speed]}"),
        )
        self.console = self._bar.console
        self._task = self._bar.add_task("", total=total, completed=done, speed="")
        self._bar.start()

    def advance(self, tokens_per_second: float) -> None:
        self._bar.update(self._task, advance=1, speed=f"{tokens_per_second:.0f} tokens/s")

    def stop(self) -> None:
        self._bar.stop()
