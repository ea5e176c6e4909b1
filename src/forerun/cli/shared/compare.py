"""Speculative against plain decoding: same process, same engine, paired runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.cli.shared.run import Job, Timed, run

if TYPE_CHECKING:
    from forerun.cli.shared.inputs import Row
    from forerun.engine import Completion

PAIRS = 3  # runs of plain and of speculative decoding


@dataclass(frozen=True)
class Difference:
    """Where a greedy output differs from the plain one, and why."""

    request: int
    position: int
    near_tie: bool
    message: str


@dataclass(frozen=True)
class Comparison:
    """The outcome of paired runs."""

    plain: Timed
    """The plain run of median speed."""
    speculative: Timed
    """The speculative run of median speed."""
    ratios: list[float]
    """Speed-up of each pair, in tokens per second."""
    identical: bool
    lossless: bool
    """Whether the rule is."""
    certain: bool
    """Whether every request is greedy, or drawn by its seed's noise (`gumbel`)."""
    differences: list[Difference]

    @property
    def speedup(self) -> float:
        """Median over the pairs."""
        return statistics.median(self.ratios)

    @property
    def must_match(self) -> bool:
        """Whether identical outputs are promised; coins promise the distribution only."""
        return self.certain and self.lossless

    @property
    def bug(self) -> bool:
        """Whether outputs differ that no rounding explains."""
        return any(not d.near_tie for d in self.differences)

    def to_json(self) -> dict[str, Any]:
        """The documented shape."""
        return {
            "identical": self.identical,
            "must_match": self.must_match,
            "speedup": self.speedup,
            "speedups": self.ratios,
            "tokens_per_second": self.speculative.tokens_per_second,
            "plain": {
                "tokens_per_second": self.plain.tokens_per_second,
                "seconds": self.plain.seconds,
                "tokens": self.plain.tokens,
                "completions": [c.to_json() for c in self.plain.completions],
            },
            "differences": [vars(d) for d in self.differences],
        }


def compare(
    job: Job,
    rows: Sequence[Row],
    shown: Sequence[Completion],
    tell: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """Run `PAIRS` pairs in turns and judge the outputs against those already `shown`.

    Both sides use the seeds of `shown`. The order alternates from pair to pair, so that a machine
    that gets slower or faster favours neither.
    """
    rows = [
        replace(row, sampling=replace(row.sampling, seed=done.seed))
        for row, done in zip(rows, shown, strict=True)
    ]
    runs: dict[bool, list[Timed]] = {False: [], True: []}
    for pair in range(PAIRS):
        for plain in (True, False) if pair % 2 == 0 else (False, True):
            kind = "plain" if plain else "speculative"
            tell(f"comparing: {kind} decoding, run {pair + 1} of {PAIRS}")
            runs[plain].append(run(job, rows, plain=plain))
    ratios = [
        fast.tokens_per_second / plain.tokens_per_second
        for fast, plain in zip(runs[False], runs[True], strict=True)
    ]
    plain_run, fast_run = _median(runs[True]), _median(runs[False])
    certain = job.rule.gumbel_max or all(row.sampling.greedy for row in rows)
    ours = [c.tokens for c in shown]
    theirs = [c.tokens for c in plain_run.completions]
    differences = _differences(job, rows, ours, theirs) if certain and job.rule.lossless else []
    return Comparison(
        plain_run, fast_run, ratios, ours == theirs, job.rule.lossless, certain, differences
    )


def _median(runs: list[Timed]) -> Timed:
    return sorted(runs, key=lambda r: r.tokens_per_second)[len(runs) // 2]


def _differences(
    job: Job, rows: Sequence[Row], ours: list[list[int]], theirs: list[list[int]]
) -> list[Difference]:
    from forerun.lab import audit

    differences = []
    for i, (row, a, b) in enumerate(zip(rows, ours, theirs, strict=True)):
        if a != b:
            first = audit.explain(job.model, row.ids, a, b, row.sampling)
            differences.append(Difference(i, first.position, first.near_tie, first.message))
    return differences
