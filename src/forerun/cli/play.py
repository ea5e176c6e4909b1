"""Runs requests and shows them: one as it grows, many as they finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from forerun.cli import compare as comparing
from forerun.cli.console import status
from forerun.cli.guard import say
from forerun.cli.report import document, print_json
from forerun.cli.run import Job, Timed, run, warm_up
from forerun.cli.show import (
    Progress,
    RoundView,
    TextView,
    progress,
    show_comparison,
    show_legend,
    show_lossy,
    show_summary,
    show_text,
)

if TYPE_CHECKING:
    from forerun.cli.inputs import Row
    from forerun.engine import Completion, Event


def play(
    job: Job,
    rows: Sequence[Row],
    *,
    many: bool = False,
    compare: bool = False,
    rounds: bool = False,
    as_json: bool = False,
    explain: bool = True,
) -> None:
    """Run, show, compare.

    Args:
        job: models and policies.
        rows: the requests.
        many: show each text when it is finished, under a progress bar.
        compare: also run plain decoding.
        rounds: a line per round.
        as_json: print the document instead of anything else.
        explain: say what the colours mean.
    """
    if compare:
        with status("warming up"):
            warm_up(job, rows[0])
    one_by_one = not many and not as_json
    done = _one(job, rows[0], rounds) if one_by_one else _many(job, rows, rounds, as_json)
    if not as_json:
        if explain:
            show_legend()
        show_summary(done.completions, done.seconds if many else None)
        if not job.rule.lossless:
            show_lossy(job.about.get("rule", ""))
    compared = None
    if compare:
        with status("comparing") as tell:
            compared = comparing.compare(job, rows, done.completions, tell)
    if as_json:
        print_json(document(job, rows, done.completions, compared))
    elif compared is not None:
        show_comparison(compared)
    if compared is not None and compared.bug:
        raise typer.Exit(say("greedy output differs from plain decoding: please report this", 1))


def _one(job: Job, row: Row, rounds: bool) -> Timed:
    view = TextView(row, RoundView(job.model.tokenizer) if rounds else None)
    view.begin()
    try:
        done = run(job, [row], on_event=lambda _, event: view.add(event))
        view.end(done.completions[0].pieces)
    finally:
        view.close()
    return done


def _many(job: Job, rows: Sequence[Row], rounds: bool, silent: bool) -> Timed:
    lines = RoundView(job.model.tokenizer) if rounds and not silent else None
    with progress(len(rows)) as bar:
        shown = _Finished(rows, bar, silent)

        def on_event(index: int, event: Event) -> None:
            if lines is not None:
                lines.add(event, index)
            if event.completion is not None:
                shown.add(index, event.completion)

        return run(job, rows, on_event=on_event)


class _Finished:
    """Prints finished texts in the order of the prompts."""

    def __init__(self, rows: Sequence[Row], bar: Progress, silent: bool) -> None:
        self._rows, self._bar, self._silent = rows, bar, silent
        self._done: dict[int, Completion] = {}
        self._next = 0

    def add(self, index: int, completion: Completion) -> None:
        """One more is finished; print it and those it held up."""
        self._done[index] = completion
        self._bar.advance(completion.stats.tokens_per_second)
        while not self._silent and self._next in self._done:
            show_text(self._rows[self._next], self._done.pop(self._next), self._bar.console)
            self._next += 1
