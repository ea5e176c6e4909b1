"""What a reader sees: the text as it grows, a line per round, the summary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forerun.cli.shared.console import (
    STYLES,
    Writer,
    clean,
    coloured,
    count,
    legend,
    note,
    one_line,
    stderr,
    stdout,
)
from forerun.cli.shared.progress import make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from forerun.cli.shared.compare import Comparison
    from forerun.cli.shared.inputs import Row
    from forerun.engine import Completion, Event, Piece

ENDED = {
    "eos": "end of text",
    "stop": "a stop string",
    "length": "--max-new-tokens",
    "context": "a full context",
    "cancelled": "cancelled",
    "error": "an error",
}


class TextView:
    """Prints one request's text as it is written.

    Args:
        row: the request; its prompt is shown on terminals.
        rounds: print rounds instead of the growing text; the text comes at the end.
    """

    def __init__(self, row: Row, rounds: RoundView | None = None) -> None:
        self._out, self._rounds = stdout(), rounds
        self._writer = Writer(self._out)
        self._prompt = row.text
        self._tail = ""
        self._open = False

    def begin(self) -> None:
        """Show the prompt."""
        if self._out.is_terminal and self._rounds is None:
            self._writer.write(self._prompt, "dim")
        self._open = True

    def add(self, event: Event) -> None:
        """Show what a round added."""
        if self._rounds is not None:
            self._rounds.add(event)
        else:
            self.add_pieces(event.pieces)

    def end(self, pieces: Sequence[Piece]) -> None:
        """Show what `add` did not, and end the line."""
        if self._rounds is not None:
            if self._out.is_terminal:
                self._writer.write(self._prompt, "dim")
            self.add_pieces(pieces)
        self.close()

    def close(self) -> None:
        """End the line (also when interrupted)."""
        self._writer.flush()
        if self._open and (self._out.is_terminal or (self._tail and self._tail != "\n")):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._open = False

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """Write tokens in the colours of their origins."""
        for piece in pieces:
            self._writer.write(piece.text, STYLES[piece.origin])
            self._tail = piece.text[-1:] or self._tail


def show_text(row: Row, completion: Completion, bar: Console, head: bool) -> None:
    """Print a finished text; above a running progress bar, if there is one.

    Args:
        row: the request.
        completion: its text.
        bar: where the progress bar is.
        head: begin with a line that names the prompt.
    """
    out = stdout()
    name = "" if row.id is None else f" ({one_line(str(row.id))})"
    line = f"==> prompt {row.index + 1}{name} <==\n" if head else ""
    if not out.is_terminal:
        apart = "\n" if head and row.index else ""
        end = "" if completion.text.endswith("\n") else "\n"
        print(f"{apart}{line}{completion.text}", end=end, flush=True)
        return
    text = Text.assemble((line, "bold"), (clean(row.text), "dim"))
    text = Text.assemble(text, *((clean(p.text), STYLES[p.origin]) for p in completion.pieces))
    (bar if bar.is_terminal else out).print(text, end="\n\n")


class RoundView:
    """Prints one line per round on stderr."""

    def __init__(self, tokenizer: Any) -> None:
        self._err, self._tokenizer = stderr(), tokenizer
        self._count = 0

    def add(self, event: Event, request: int | None = None) -> None:
        """Show one round."""
        self._count += 1
        r = event.round
        ms = 1e3 * (r.draft_seconds + r.verify_seconds + r.other_seconds)
        row = "" if request is None else f"prompt {request + 1:<3} "
        # Of the round's tokens, as in the summary; the target's own add none.
        each = "" if r.drift is None else f"drift {sum(r.drift) / max(r.committed, 1):.3f}  "
        line = Text(
            f"{row}round {self._count:>3}  drafted {r.drafted:>2}  accepted {r.accepted:>2}  "
            f"committed {r.committed:>2}  {r.stopped_by.label:<11} {ms:7.1f} ms  {each}"
        )
        line.append_text(self._words(event.pieces, event.drafted[r.accepted :]))
        self._err.print(line, soft_wrap=True)

    def _words(self, pieces: Sequence[Piece], left: list[int]) -> Text:
        colours = coloured(self._err)
        words = Text()
        for piece in pieces:
            if piece.origin == "draft":
                words.append(one_line(piece.text), STYLES["draft"])
        if rejected := one_line(self._tokenizer.decode(left)) if left else "":
            words.append(rejected if colours else f"[-{rejected}-]", "red strike")
        for piece in pieces:
            if piece.origin != "draft" and (text := one_line(piece.text)):
                words.append(text if colours else f"{{+{text}+}}", STYLES[piece.origin])
        return words


@dataclass
class Tally:
    """Sums over completions."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    judged: int = 0
    seconds: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    encode: float | None = None
    """With an encoder."""
    drift: float | None = None
    """Under a lossy rule."""
    drift_max: float = 0.0
    ended: str = ""
    """Why the last one ended."""

    @classmethod
    def of(cls, completions: Iterable[Completion]) -> Tally:
        """The sums of these."""
        tally = cls()
        for completion in completions:
            tally.add(completion)
        return tally

    def add(self, completion: Completion) -> None:
        """One more."""
        stats = completion.stats
        self.prompts += 1
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        self.accepted += stats.accepted
        self.judged += sum(min(r.accepted + 1, r.drafted) for r in completion.rounds)
        self.seconds += stats.seconds
        self.draft += stats.draft_seconds
        self.verify += stats.verify_seconds
        self.other += stats.other_seconds
        if stats.encode_seconds is not None:
            self.encode = (self.encode or 0.0) + stats.encode_seconds
        if stats.drift_mean is not None:
            self.drift = (self.drift or 0.0) + stats.drift_mean * stats.tokens
            self.drift_max = max(self.drift_max, stats.drift_max or 0.0)
        self.ended = completion.finish_reason


def summary(tally: Tally, seconds: float | None = None) -> Text:
    """One line: tokens, rounds, acceptance, speed, where the time went, why it ended."""
    took = tally.seconds if seconds is None else seconds
    kept = f"{tally.accepted / tally.judged:.0%}" if tally.judged else "– (nothing drafted)"
    one = tally.prompts == 1
    parts = [
        "" if one else count(tally.prompts, "prompt"),
        f"{count(tally.tokens, 'token')} in {count(tally.rounds, 'round')}",
        f"{tally.tokens / tally.rounds:.2f} per round" if tally.rounds else "",
        f"acceptance {kept}",
        f"{tally.tokens / took:.0f} tokens/s" if took > 0 else "",
        drift(tally),
        shares(tally),
        "" if tally.encode is None else f"encoding {1e3 * tally.encode:.0f} ms",
        f"ended by {ENDED[tally.ended]}" if one else "",
    ]
    return Text(" · ".join(p for p in parts if p), "bold")


def drift(tally: Tally) -> str:
    """Distance from the target's distribution under a lossy rule; nothing under a lossless one."""
    if tally.drift is None:
        return ""
    mean = tally.drift / max(tally.tokens, 1)
    return f"drift {_small(mean)} a token (max {_small(tally.drift_max)})"


def _small(value: float) -> str:
    return "below 0.001" if 0 < value < 0.001 else f"{value:.2g}"


def shares(tally: Tally) -> str:
    """Where the time of the rounds went."""
    draft, verify, other = tally.draft, tally.verify, tally.other
    total = draft + verify + other
    if not total:
        return ""
    return f"draft {draft / total:.0%}, verify {verify / total:.0%}, else {other / total:.0%}"


def show_legend() -> None:
    """Say what the colours mean, where there are any."""
    if stdout().is_terminal:
        stderr().print()
    if coloured(stdout()):
        note(stderr(), legend())


def show_summary(tally: Tally, seconds: float | None = None) -> None:
    """Print the summary line on stderr."""
    note(stderr(), summary(tally, seconds))


def show_lossy(rule: str) -> None:
    """Say once, on stderr, what a lossy rule means."""
    note(stderr(), Text(f"lossy rule {rule}: the text may differ from the target's own", "yellow"))


def show_comparison(result: Comparison) -> None:
    """Print speed-up and whether the outputs are the same, on stderr."""
    console = stderr()
    low, high = min(result.ratios), max(result.ratios)
    note(
        console,
        Text(
            f"{result.speedup:.2f}× the speed of plain decoding "
            f"({result.speculative.tokens_per_second:.0f} against "
            f"{result.plain.tokens_per_second:.0f} tokens/s; median of {len(result.ratios)} "
            f"paired runs, {low:.2f}–{high:.2f})",
            "bold",
        ),
    )
    note(console, _sameness(result))


def _sameness(result: Comparison) -> Text:
    if result.identical:
        return Text("identical output: yes, token for token", "green")
    if not result.must_match:
        why = (
            "identical output: no, and it need not be: both are draws from the same distribution"
            if result.lossless
            else "identical output: no, and it need not be: the rule is lossy"
        )
        return Text(why, "dim")
    lines = Text("identical output: NO", "red" if result.bug else "yellow")
    for difference in result.differences:
        lines.append(f"\n  prompt {difference.request + 1}: {clean(difference.message)}")
    return lines


@contextmanager
def progress(total: int, done: int = 0) -> Iterator[Progress]:
    """A bar over prompts, on stderr, on terminals only."""
    bar = Progress(total, done)
    try:
        yield bar
    finally:
        bar.stop()


class Progress:
    """Counts finished prompts."""

    def __init__(self, total: int, done: int = 0) -> None:
        from rich import progress as bars

        self._bar = make(
            bars.TextColumn("{task.completed}/{task.total} prompts"),
            bars.BarColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[speed]}"),
        )
        self.console = self._bar.console
        self._task = self._bar.add_task("", total=total, completed=done, speed="")
        self._bar.start()

    def advance(self, tokens_per_second: float) -> None:
        """One more is done."""
        self._bar.update(self._task, advance=1, speed=f"{tokens_per_second:.0f} tokens/s")

    def stop(self) -> None:
        """Remove the bar."""
        self._bar.stop()
