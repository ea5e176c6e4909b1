"""`forerun bench compare`: changes between two measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import note, stdout, table
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError

if TYPE_CHECKING:
    from forerun.lab.bench.report import Change

DRIFT = 0.05
"""A change of plain decoding above which the machine was in another state."""


def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="Results: a folder or its file.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Those to compare with.")],
    as_json: options.Json = False,
) -> None:
    """Say what changed from A to B, and which changes are beyond noise.

    Pairs the prompts and methods both have. Judged is the speed-up over plain decoding of the same
    run, so that a machine that was busier in one of them does not count.
    """
    from forerun.lab.bench import report
    from forerun.lab.bench.bench import load

    changes = report.compare(load(before), load(after))
    if not changes:
        raise SettingError("the two results share no prompts measured by the same method")
    if as_json:
        print_json(report.changes(changes))
        return
    _show_changes(changes)


def _show_changes(changes: Sequence[Change]) -> None:
    from forerun.lab.bench.report import ALL, LEVEL, show

    console = stdout()
    several = len({c.batch for c in changes}) > 1
    right = ("time, A/B", "speed-up, B/A", "B is")
    shown = table("method", "family", *(["batch"] if several else []), right=right, no_wrap=True)
    styles = {"faster": "green", "slower": "red", "within noise": "dim"}
    for c in changes:
        size = [str(c.batch)] if several else []
        relative = "–" if c.speedup is None else show(c.speedup)
        verdict = Text(c.verdict, styles[c.verdict])
        shown.add_row(c.method, c.family, *size, show(c.seconds), relative, verdict)
    console.print(shown)
    beyond = sum(c.verdict != "within noise" for c in changes)
    note(
        console,
        f"\n{beyond} of {len(changes)} cells beyond noise; by chance alone up to about "
        f"{len(changes) * LEVEL:.1f} would be",
    )
    for c in changes:
        if c.speedup is None and c.family == ALL and abs(c.seconds["mean"] - 1) > DRIFT:
            at = f" at batch {c.batch}" if several else ""
            note(
                console,
                f"plain decoding itself took {1 / c.seconds['mean']:.2f} times as long in B{at}: "
                "the machine was in another state, measure again before you trust small changes",
            )
    for c in changes:
        if c.family == ALL and c.same_text < 1:
            share = f"{(1 - c.same_text) * 100:.0f} %"
            note(console, f"{c.method} wrote other texts in B for {share} of the prompts")
