"""Timing a pair of models and the engine around them, for a table of costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np

from forerun.checks import whole
from forerun.drafters.model import ModelDrafter
from forerun.engine.results import Completion, Round
from forerun.errors import SettingError, require
from forerun.lab.provenance import identity, machine
from forerun.lab.traces.costs import REPEATS, WIDTHS, Cell, CostTable, Spread
from forerun.model import Model
from forerun.runtime.base import Rows

Texts = Sequence[Sequence[int]]  # prompts, as token ids
WARM = 3  # warm-up turns, not counted
LIVE = (0, 1, 2, 4, 8)
"""Tokens drafted per round in the live runs from which the costs of draft steps and of the
engine's own work are fitted; of a row alone also those that fill a pass up to each level."""
LIVE_TOKENS = 48  # written per text in a live run
ASKED = "hf-threshold(threshold=0,length={})"  # drafts so many tokens, and is asked about each
TREE = (-1, -1, -1, -1, 1)  # three drafted tokens, and a second choice beside the second
THROWN_AWAY = "gammatune+(threshold=1,keep=False)"  # a token, thrown away unless it is certain
LIVE_TURNS = 10  # live runs of each draft length, the first a warm-up


def measure(
    model: Model,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (128,),
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
    progress: Callable[[int], None] | None = None,
) -> CostTable:
    """Time the models on this machine; arguments and errors as for `cells`."""
    measured = list(cells(model, batches, contexts, widths, repeats, progress))
    return gathered(model, measured, repeats)


def gathered(model: Model, measured: Sequence[tuple[Cell, Spread]], repeats: int) -> CostTable:
    """A table of measured cells, at least one, with its provenance."""
    about = {
        "target": identity(model.target),
        "draft": identity(_drafter(model).rows),
        "repeats": repeats,
        **machine(model.target),
    }
    return CostTable(tuple(c for c, _ in measured), about, tuple(s for _, s in measured))


def cells(
    model: Model,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (128,),
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Cell, Spread]]:
    """Measure cell by cell; a caller may stop between cells.

    The target's passes at every width are timed in turns, so that a machine that gets slower
    favours none; medians count, brought to the level of live runs. The times of draft steps and of
    the engine's own work are lines fitted to these runs, by tokens drafted. A draft step on its own
    would mislead: a round's first finds the target's weights in the caches, later ones their own.

    Args:
        model: a target and a draft model, not generating.
        batches: rows, ≥ 1 each.
        contexts: tokens before those fed, ≥ 1 each.
        widths: tokens fed to the target per row; 1 is always among them.
        repeats: timings of each, ≥ 1.
        progress: called with the turns done, of `repeats` per cell.

    Raises:
        SettingError: no draft model, a number out of range, or a context that does not fit.
    """
    drafter = _drafter(model)
    if model.target.lengths:
        raise SettingError("a stream of this model is still running; finish or close it first")
    wide = sorted({1, *widths})
    for name, numbers in (("batch", batches), ("context", contexts), ("widths", wide)):
        require(bool(numbers), name, numbers, "at least one")
        for number in numbers:
            whole(name, number, 1)
    whole("repeats", repeats, 1)
    longest, room = max(contexts), min(model.target.limit, drafter.limit)
    more = max(wide[-1], LIVE_TOKENS) + 1
    if model.target.facts.source_limit is not None:  # an encoder reads the context
        require(longest < model.prompt_limit, "context", longest, f"below {model.prompt_limit}")
        longest = len(model.opening.prompt)
    if longest + more > room:
        raise SettingError(
            f"a context of {longest} and {more} tokens more do not fit the models' {room}; use a "
            "smaller `context` or `widths`"
        )
    return _cells(model, drafter, list(product(batches, contexts)), wide, repeats, progress)


def _drafter(model: Model) -> ModelDrafter:
    if not isinstance(model.drafter, ModelDrafter):
        raise SettingError(
            "measuring costs needs a draft model, and this model's drafter is a "
            f"{type(model.drafter).__name__}; name one as `draft`"
        )
    return model.drafter


def _cells(
    model: Model,
    drafter: ModelDrafter,
    sizes: Sequence[tuple[int, int]],
    widths: Sequence[int],
    repeats: int,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[Cell, Spread]]:
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done)

    for batch, context in sizes:
        prompts = _prompts(min(model.target.vocab_size, drafter.rows.vocab_size), batch, context)
        turns = _passes(model.target, *model.contexts(prompts), widths, repeats, tell)
        levels = model.target.executor.levels if batch == 1 else ()
        lengths = sorted({*LIVE, *(n - 1 for n in levels if n <= widths[-1])})
        live, asking = _live(model, prompts, lengths)
        verify = _as_live(turns, {n + 1: times for n, times in live.verify.items()})
        # Rounds without a draft save more than one token's work, so they are not on the line.
        rounds = {n: float(np.median(times)) for n, times in live.other.items()}
        fixed = rounds.pop(0)
        more, work = line(rounds)
        draft = {n: times for n, times in live.draft.items() if n}
        first, step = line({n: float(np.median(times)) for n, times in draft.items()})
        seconds = tuple((w, float(np.median(verify[w]))) for w in widths)
        lead = first + max(more - fixed, 0.0)
        cold = _cold(model, prompts)
        cell = Cell(
            step + work, seconds, fixed, batch, context, lead, levels, cold,
            asking=asking, tree=_tree(model.target, *model.contexts(prompts), repeats),
        )  # fmt: skip
        spread = Spread(
            _range([max(took - first, 0.0) / n for n, times in draft.items() for took in times]),
            tuple(_range(verify[w]) for w in widths),
            work,
            tuple((n, float(np.median(t)), *_range(t)) for n, t in live.other.items()),
        )
        yield cell, spread


def _prompts(vocab: int, batch: int, context: int) -> list[list[int]]:
    """`batch` prompts whose rows cover `context` tokens and are fed the next."""
    random = np.random.default_rng(0)
    prompts: list[list[int]] = random.integers(0, vocab, (batch, context + 1)).tolist()
    return prompts


def _passes(
    target: Rows,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]] | None,
    widths: Sequence[int],
    repeats: int,
    tell: Callable[[], None],
) -> dict[int, list[float]]:
    """Seconds of the target's passes, by width."""
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    covered = len(prompts[0]) - 1
    try:
        target.read(prompts, widths[-1], sources)
        for turn in range(WARM + repeats):
            for width in widths:
                before = target.seconds
                target.feed([list(prompt[-1:]) * width for prompt in prompts])
                if turn >= WARM:
                    seconds[width].append(target.seconds - before)
                for row in range(len(prompts)):
                    target.rollback(row, covered)
            if turn >= WARM:
                tell()
    finally:
        target.keep([])
    return seconds


def _tree(target: Rows, prompts: Texts, sources: Texts | None, repeats: int) -> float:
    """Seconds that a second choice adds to a pass of as many tokens, one that is kept."""
    if not target.executor.trees:
        return 0.0
    seconds: dict[bool, list[float]] = {False: [], True: []}
    pieces = [list(prompt[-1:]) * len(TREE) for prompt in prompts]
    covered = len(prompts[0]) - 1
    try:
        target.read(prompts, len(TREE), sources)
        for turn in range(WARM + repeats):
            for leaf, times in seconds.items():
                began = time.perf_counter()
                target.feed(pieces, None, [TREE] * len(prompts) if leaf else ())
                if leaf:
                    target.move(0, covered + len(TREE) - 1, covered + TREE[-1] + 1)
                if turn >= WARM:
                    times.append(time.perf_counter() - began)
                for row in range(len(prompts)):
                    target.rollback(row, covered)
    finally:
        target.keep([])
    chain, tree = (float(np.median(times)) for times in seconds.values())
    return max(tree - chain, 0.0)


def _as_live(
    turns: dict[int, list[float]], passes: dict[int, list[float]]
) -> dict[int, list[float]]:
    """Passes timed in turns, as fast as live: there each comes after others of its own width."""
    medians = {width: float(np.median(times)) for width, times in turns.items()}
    live = sorted(passes)
    if not live:
        return turns
    expected = np.interp(live, list(medians), list(medians.values()))
    ratios = [float(np.median(passes[w])) / timed for w, timed in zip(live, expected, strict=True)]
    return {
        width: [seconds * float(np.interp(width, live, ratios)) for seconds in times]
        for width, times in turns.items()
    }


@dataclass
class _Live:
    """Seconds of live rounds in which every row drafts as many tokens, by these."""

    draft: dict[int, list[float]] = field(default_factory=dict)
    verify: dict[int, list[float]] = field(default_factory=dict)
    other: dict[int, list[float]] = field(default_factory=dict)  # outside both models

    def add(self, drafted: int, done: Sequence[Completion]) -> None:
        """The rounds of texts that were written together."""
        # Rows that share a round report one clock; where some are missing prompts were read.
        shared: dict[tuple[float, float], list[Round]] = {}
        for seen in chain.from_iterable(c.rounds for c in done):
            shared.setdefault((seen.draft_seconds, seen.verify_seconds), []).append(seen)
        for (drafting, verifying), rounds in shared.items():
            every = len(rounds) == len(done) and all(r.drafted == drafted for r in rounds)
            if every and verifying:
                self.other.setdefault(drafted, []).append(rounds[0].other_seconds)
                self.verify.setdefault(drafted, []).append(verifying)
                self.draft.setdefault(drafted, []).append(drafting)

    def drafting(self, drafted: int) -> float:
        """The median outside the target; 0 if there was no such round."""
        times = zip(self.draft.get(drafted, ()), self.other.get(drafted, ()), strict=True)
        return float(np.median([one + other for one, other in times] or [0.0]))


def _live(model: Model, prompts: Texts, lengths: Sequence[int]) -> tuple[_Live, float]:
    """Live rounds by tokens drafted, and what each of these takes more if a controller is asked."""
    live, asked = _Live(), _Live()
    longest = max(lengths)
    for turn in range(LIVE_TURNS):
        of, asking = (live, asked) if turn else (_Live(), _Live())  # the first is a warm-up
        for n in lengths:
            of.add(n, _written(model, f"fixed({n})", prompts, plain=n == 0))
        asking.add(longest, _written(model, ASKED.format(longest), prompts))
    more = asked.drafting(longest) - live.drafting(longest)
    return live, max(more / longest, 0.0)


def _written(
    model: Model, controller: str, prompts: Texts, plain: bool = False
) -> Sequence[Completion]:
    """Texts of a live run."""
    return model.generate(
        prompts,
        controller=controller,
        plain=plain,
        batch_size=len(prompts),
        max_new_tokens=LIVE_TOKENS,
        ignore_eos=True,
    )


def _cold(model: Model, prompts: Texts) -> float:
    """Seconds that a plain pass takes more behind a draft that was thrown away."""
    seconds: dict[str, list[float]] = {"fixed(0)": [], THROWN_AWAY: []}
    for _ in range(LIVE_TURNS // 2):
        for controller, times in seconds.items():
            done = _written(model, controller, prompts)
            rounds = [r for r in done[-1].rounds if not r.drafted and r.verify_seconds]
            times += [r.verify_seconds for r in rounds]
    plain, behind = (float(np.median(times or [0.0])) for times in seconds.values())
    return max(behind - plain, 0.0)


def line(points: dict[int, float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the least-squares line through `{x: y}`.

    >>> line({0: 1.0, 2: 2.0, 4: 3.0})
    (1.0, 0.5)
    >>> line({0: 2.0, 2: 1.0})
    (1.5, 0.0)
    """
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()))
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 0.0
    slope = max(slope, 0.0)
    start = float(y.mean() - slope * x.mean())
    if start < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return start, slope


def _range(times: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(times, [0.1, 0.9])
    return float(low), float(high)
