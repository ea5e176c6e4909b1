"""One line about a run: tokens, rounds, acceptance, speed; and how it compares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from forerun.cli.shared.console import clean, count, note, stderr

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job
    from forerun.engine import Completion
    from forerun.lab.paired import PairedRuns

ENDED = {
    "eos": "end of text",
    "stop": "a stop string",
    "length": "--max-new-tokens",
    "context": "a full context",
    "cancelled": "cancelled",
    "error": "an error",
}


@dataclass
class RunSummary:
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
    def of(cls, completions: Iterable[Completion]) -> RunSummary:
        tally = cls()
        for completion in completions:
            tally.add(completion)
        return tally

    def add(self, completion: Completion) -> None:
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

    def show(self, seconds: float | None, job: Job) -> None:
        """Print it on stderr, with a warning of a lossy rule; `seconds` is the wall time of all."""
        note(stderr(), self.line(seconds))
        if not job.rule.lossless:
            rule = job.about.get("rule", "")
            warning = f"lossy rule {rule}: the text may differ from the target's own"
            note(stderr(), Text(warning, "yellow"))

    def line(self, seconds: float | None = None) -> Text:
        """Tokens, rounds, acceptance, speed, where the time went, why it ended."""
        took = self.seconds if seconds is None else seconds
        acceptance = f"{self.accepted / self.judged:.0%}" if self.judged else "– (nothing drafted)"
        one = self.prompts == 1
        parts = [
            "" if one else count(self.prompts, "prompt"),
            f"{count(self.tokens, 'token')} in {count(self.rounds, 'round')}",
            f"{self.tokens / self.rounds:.2f} per round" if self.rounds else "",
            f"acceptance {acceptance}",
            f"{self.tokens / took:.0f} tokens/s" if took > 0 else "",
            self._drift(),
            self._shares(),
            "" if self.encode is None else f"encoding {1e3 * self.encode:.0f} ms",
            f"ended by {ENDED[self.ended]}" if one else "",
        ]
        return Text(" · ".join(p for p in parts if p), "bold")

    def _drift(self) -> str:
        """Distance from the target's distribution under a lossy rule."""
        if self.drift is None:
            return ""
        mean = self.drift / max(self.tokens, 1)
        return f"drift {_small(mean)} a token (max {_small(self.drift_max)})"

    def _shares(self) -> str:
        """Where the time of the rounds went."""
        total = self.draft + self.verify + self.other
        parts = {"draft": self.draft, "verify": self.verify, "else": self.other}
        return ", ".join(f"{name} {part / total:.0%}" for name, part in parts.items() if total)


def _small(value: float) -> str:
    return "below 0.001" if 0 < value < 0.001 else f"{value:.2g}"


def show_comparison(result: PairedRuns) -> None:
    """Print speed-up and whether the outputs are the same, on stderr."""
    low, high = min(result.ratios), max(result.ratios)
    line = (
        f"{result.speedup:.2f}× the speed of plain decoding "
        f"({result.speculative.tokens_per_second:.0f} against "
        f"{result.plain.tokens_per_second:.0f} tokens/s; median of {len(result.ratios)} "
        f"paired runs, {low:.2f}–{high:.2f})"
    )
    note(stderr(), Text(line, "bold"))
    note(stderr(), _sameness(result))


def _sameness(result: PairedRuns) -> Text:
    if result.identical:
        return Text("identical output: yes, token for token", "green")
    if not result.must_match:
        reason = (
            "both are draws from the same distribution" if result.lossless else "the rule is lossy"
        )
        return Text(f"identical output: no, and it need not be: {reason}", "dim")
    lines = Text("identical output: NO", "red" if result.bug else "yellow")
    for number, difference in result.differences.items():
        lines.append(f"\n  prompt {number + 1}: {clean(difference.message)}")
    return lines
