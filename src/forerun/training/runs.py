"""A run of training: it is logged, saved now and then, stopped at any time and resumed."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOG = "log.jsonl"


def keep(
    run: Any,
    records: Iterator[dict[str, Any]],
    out: Path,
    name: str,
    *,
    until: int | None = None,
    seconds: float = 240,
) -> None:
    """Write every record to the log, report progress, save the run as `name`.

    It is saved every `seconds`, at step `until`, on SIGTERM or SIGINT, and when there are no more
    records. A run has `step`, `tokens` and `save(path)`; taking a record makes the step.
    """
    saved = time.monotonic()
    with (
        (out / LOG).open("a", encoding="utf-8") as log,
        reporter() as report,
        stopping() as stopped,
    ):
        for record in records:
            log.write(json.dumps(record) + "\n")
            log.flush()
            if run.step % 20 == 0 or run.step <= 5:
                report(
                    f"step {run.step}  {run.tokens / 1e6:.2f} M tokens  loss {record['loss']:.3f}"
                    f"  {record['tokens_per_second']} tokens/s"
                )
            if time.monotonic() - saved > seconds:
                run.save(out / name)
                saved = time.monotonic()
            if run.step == until or stopped():
                break
    run.save(out / name)


@contextmanager
def reporter() -> Iterator[Callable[[str], None]]:
    """Report how far a run is: one changing line on a terminal, plain lines otherwise."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and SIGINT into a question that a loop asks after every step."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
