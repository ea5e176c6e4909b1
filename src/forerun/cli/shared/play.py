"""Runs requests and shows them: one as it grows, many as they finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from forerun.cli.shared import compare as comparing
from forerun.cli.shared.console import note, status, stderr
from forerun.cli.shared.guard import fail
from forerun.cli.shared.report import document, print_json
from forerun.cli.shared.run import Job, play_through, warm_up
from forerun.cli.shared.show import (
    Progress,
    RoundView,
    Tally,
    TextView,
    progress,
    show_comparison,
    show_legend,
    show_lossy,
    show_summary,
    show_text,
)

if TYPE_CHECKING:
    from forerun.cli.shared.inputs import Row
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
        explain: print the legend of the colours.
    """
    if compare:
        with status("warming up"):
            warm_up(job, rows[0])
    shown = _Finished(rows, silent=as_json, single=not many and not as_json)
    try:
        took = shown.run_one(job, rounds) if shown.single else shown.run_all(job, rounds)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if as_json and (interrupted or shown.done):
            print_json(document(job, rows, shown.done, None))
        if interrupted:
            note_interrupted(len(shown.done), len(rows))
        raise
    completions = list(shown.done.values())
    if not as_json:
        if explain:
            show_legend()
        show_summary(Tally.of(completions), took if many else None)
        if not job.rule.lossless:
            show_lossy(job.about.get("rule", ""))
    compared = None
    if compare:
        with status("comparing") as tell:
            compared = comparing.compare(job, rows, completions, tell)
    if as_json:
        print_json(document(job, rows, shown.done, compared))
    elif compared is not None:
        show_comparison(compared)
    if compared is not None and compared.bug:
        raise typer.Exit(fail("greedy output differs from plain decoding: please report this", 1))


def note_interrupted(done: int, total: int, hint: str = "") -> None:
    """Print on stderr that the run was interrupted, and what is complete."""
    count = f"; {done:,} of {total:,} prompts are complete" if total > 1 else ""
    note(stderr(), f"interrupted{count}{hint}")


class _Finished:
    """Runs requests and shows finished texts in the order of the prompts.

    Args:
        rows: the requests.
        silent: show nothing.
        single: there is one, shown as it grows.
    """

    def __init__(self, rows: Sequence[Row], silent: bool, single: bool) -> None:
        self._rows, self._silent, self.single = rows, silent, single
        self._finished: dict[int, Completion] = {}
        self._next = 0

    @property
    def done(self) -> dict[int, Completion]:
        """Completions so far by the index of their prompt, in order."""
        return dict(sorted(self._finished.items()))

    def run_one(self, job: Job, rounds: bool) -> float:
        """Run the only request; the seconds it took."""
        view = TextView(self._rows[0], RoundView(job.model.tokenizer) if rounds else None)
        view.begin()

        def on_event(index: int, event: Event) -> None:
            view.add(event)
            if event.completion is not None:
                self._finished[index] = event.completion

        try:
            took = play_through(job, self._rows, on_event)
            view.end(self._finished[0].pieces)
        finally:
            view.close()
        return took

    def run_all(self, job: Job, rounds: bool) -> float:
        """Run all requests; the seconds it took."""
        lines = RoundView(job.model.tokenizer) if rounds and not self._silent else None
        with progress(len(self._rows)) as bar:

            def on_event(index: int, event: Event) -> None:
                if lines is not None:
                    lines.add(event, index)
                if event.completion is not None:
                    self._add(index, event.completion, bar)

            try:
                return play_through(job, self._rows, on_event)
            finally:  # interrupted, also those that waited for others before them
                for index in [i for i in self.done if i >= self._next]:
                    self._show(index, bar)

    def _add(self, index: int, completion: Completion, bar: Progress) -> None:
        """One more is finished; show it and those it held up."""
        self._finished[index] = completion
        bar.advance(completion.stats.tokens_per_second)
        while self._next in self._finished:
            self._show(self._next, bar)
            self._next += 1

    def _show(self, index: int, bar: Progress) -> None:
        if not self._silent:
            head = len(self._rows) > 1
            show_text(self._rows[index], self._finished[index], bar.console, head)
