"""Search the parameters of controllers on one trace, and judge the results on another; what each
mechanism of a controller is worth.

Every trial is a replay, so a hundred settings cost about as much as decoding one prompt.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from forerun.checks import whole
from forerun.controllers import CONTROLLERS, Controller
from forerun.errors import SettingError, require
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import by_family, geometric, mean_speed, rate
from forerun.lab.traces.spaces import COSTS, SPACES, Answer, Search, Space, Trials, sampled
from forerun.lab.traces.trace import Trace
from forerun.registry import Spec, parse
from forerun.settings import Settings

SCHEMA = 1
DEFAULT = "auto"  # the controller that is recommended where the search found no better one

Progress = Callable[[str, int, int], None]  # a controller's name, trials done, all


@dataclass(frozen=True)
class SearchResult:
    """The result of a search over one controller's parameters."""

    name: str
    default: str  # the spec it started from
    best: str  # the fastest spec on the trace searched; the default if nothing beat it
    before: float  # speed-up of the default there, the geometric mean over prompts
    after: float  # speed-up of the best there
    trials: int = 1  # settings tried, the default included
    refused: int = 0  # settings tried that the controller refuses
    complete: bool = True  # whether the search came to its end


@dataclass(frozen=True)
class Tuned:
    """The results of `tune`, in the order of the controllers."""

    results: tuple[SearchResult, ...]
    fixed: SearchResult  # the best fixed length, whether or not it was asked for
    complete: bool = True  # False if it was interrupted; then it holds what was there

    @property
    def best(self) -> SearchResult:
        """The controller with the highest speed-up on the trace searched; the first of equals."""
        return max(self.results, key=lambda result: result.after)


def tune(
    trace: Trace,
    cell: Cell,
    controllers: Sequence[str] | None = None,
    *,
    budget: int = 100,
    seed: int = 0,
    progress: Progress = lambda name, done, total: None,
) -> Tuned:
    """Search the parameters of each controller for the highest speed-up on a trace.

    Args:
        trace: validation prompts.
        cell: what a round costs.
        controllers: names or specs; what a spec sets stays as it is. None is every controller that
            can be made without settings.
        budget: most settings to try per controller, ≥ 1. Where there are no more, all are tried;
            else optuna's TPE chooses.
        seed: of TPE; equal seeds give equal results.
        progress: as `Progress`.

    Raises:
        SettingError: a controller that is unknown or cannot be made.
        MissingExtraError: optuna is not installed.
        KeyboardInterrupt: interrupted before the first result. Later, see `Tuned.complete`.
    """
    whole("budget", budget, 1)
    require(isinstance(seed, int) and 0 <= seed < 2**32, "seed", seed, "a whole number below 2³²")
    specs = [parse(text) for text in (tunable() if controllers is None else controllers)]
    for spec in specs:
        CONTROLLERS.make(spec)
    # Cheap, and what the others are measured against.
    fixed = best_fixed(trace, cell)
    how: dict[str, Any] = {"budget": budget, "seed": seed, "progress": progress}
    results: list[SearchResult] = []
    try:
        for spec in specs:
            same = spec == parse("fixed")
            results.append(fixed if same else search(spec, trace, cell, **how))
            if not results[-1].complete:
                break
    except KeyboardInterrupt:
        if not results:
            raise
    return Tuned(
        tuple(results), fixed, len(results) == len(specs) and all(r.complete for r in results)
    )


def search(
    spec: Spec,
    trace: Trace,
    cell: Cell,
    *,
    budget: int,
    seed: int = 0,
    space: Space | None = None,
    make: Callable[[Mapping[str, Any]], Controller] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> SearchResult:
    """Search the parameters of a controller that `spec` does not set, or those of `space`, from
    whose values `make` builds one; an interrupt ends it early, with the best so far."""
    default, set_by_user = CONTROLLERS.text(CONTROLLERS.make(spec)), settings_of(spec)
    if space is None:
        space = {k: v for k, v in SPACES.get(spec.name, {}).items() if k not in set_by_user}

    def made(values: Mapping[str, Any]) -> str:
        chosen = Spec(spec.name, (), {**set_by_user, **values})
        return CONTROLLERS.text(CONTROLLERS.make(chosen) if make is None else make(values))

    tried = Search[str](lambda text: speed(trace, text, cell))
    before, complete = tried.score(default), True
    trials, total = proposals(space, trace.depth, cell, budget, seed)
    try:
        progress(spec.name, 1, total)
        tried.run(trials, made, lambda done: progress(spec.name, 1 + done, total))
    except KeyboardInterrupt:
        complete = False
    return SearchResult(
        spec.name, default, tried.best, before, tried.scores[tried.best], 1 + tried.trials,
        tried.refused, complete,
    )  # fmt: skip


def best_fixed(trace: Trace, cell: Cell) -> SearchResult:
    """The best fixed length, 0 for plain decoding, of all up to the trace's depth."""
    return search(parse("fixed"), trace, cell, budget=trace.depth + 1)


def proposals(space: Space, depth: int, cell: Cell, budget: int, seed: int) -> tuple[Trials, int]:
    """Values to try beside the defaults, and how many settings there will be with the defaults."""

    def ignored(value: float | None) -> None:
        """Values of a grid do not depend on speed-ups."""

    if not space:
        return (), 1
    grid = [values for p in space.values() if (values := p.values(depth)) is not None]
    if len(grid) == len(space) and (count := math.prod(map(len, grid))) <= budget:
        every = (dict(zip(space, values, strict=True)) for values in itertools.product(*grid))
        return ((values, ignored) for values in every), count + 1
    measured: list[tuple[dict[str, Any], Answer]] = []
    if budget > 1 and COSTS.keys() <= space.keys():
        slope = float(cell.verify_seconds(2) - cell.verify_seconds(1)) / cell.plain
        costs = {"cost": round(cell.ratio, 3), "slope": round(max(slope, 0), 4)}
        measured.append((costs, ignored))
    chosen = sampled(space, depth, budget - 1 - len(measured), seed)
    return itertools.chain(measured, chosen), budget


def speed(trace: Trace, controller: str | Controller, cell: Cell) -> float:
    """The geometric mean over prompts of the speed-up."""
    return mean_speed(replay(trace, controller, cell).speedup)


def tunable() -> list[str]:
    """Controllers that can be made without settings."""
    names = []
    for name in CONTROLLERS.names():
        try:
            CONTROLLERS.make(name)
        except SettingError:
            continue
        names.append(name)
    return names


def settings_of(spec: Spec) -> dict[str, Any]:
    """The settings of a spec by name, also those written without one."""
    names = [f.name for f in fields(CONTROLLERS.load(spec.name)) if f.init]
    return {**dict(zip(names, spec.args, strict=False)), **spec.kwargs}


def choose(
    tuned: Tuned, best: Mapping[str, Any], trace: Trace, cell: Cell, *, free: bool, seed: int = 0
) -> dict[str, str | None]:
    """The controller to use, `spec`, and the `reason` if it is not the search's best: that is
    chosen where other prompts show it to be better than default settings, so that the 95 % interval
    of the paired speed-up lies above 1. If any controller will do, as `free` says, it is compared
    with `DEFAULT`, too. `best` is what `verdict` says of it."""
    spec, reason, gain = tuned.best.best, None, best["test"]["gain"]
    if spec == tuned.best.default:
        reason = f"no setting of {tuned.best.name} was faster than its defaults"
    elif gain["low"] <= 1:
        spec = tuned.best.default
        reason = (
            f"{tuned.best.best} is no better than {spec} on the prompts judged "
            f"(tuned/default {interval(gain)})"
        )
    if free and spec != DEFAULT:
        ours, default = (replay(trace, text, cell).seconds for text in (spec, DEFAULT))
        over = geometric(default / ours, seed)
        if over["low"] <= 1:
            reason = f"{spec} is no better than {DEFAULT}, the default, on the prompts judged"
            return {"spec": DEFAULT, "reason": f"{reason} ({spec}/{DEFAULT} {interval(over)})"}
    return {"spec": spec, "reason": reason}


def interval(spread: Mapping[str, float]) -> str:
    """A mean with its interval, for people."""
    return f"{spread['mean']:.2f} {spread['low']:.2f}–{spread['high']:.2f}"


def verdict(
    tuned: Tuned, trace: Trace, cell: Cell, split: Mapping[str, Any], free: bool, seed: int
) -> dict[str, Any]:
    """The document of `tune --json`, but for `settings` and `exports`: the search results, replayed
    on the prompts of another trace, none of which was searched on. `split` says how many prompts
    were `searched`, and `how` they were told apart; `free` and `seed` are as of `choose`."""
    groups, took = by_family(trace), cache(lambda spec: replay(trace, spec, cell))
    judged, fixed = [], took(tuned.fixed.best)
    for result in tuned.results:
        default, best = took(result.default), took(result.best)
        ratios = {
            "default": default.speedup,
            "tuned": best.speedup,
            "gain": default.seconds / best.seconds,
            "over_fixed": fixed.seconds / best.seconds,
        }
        own = {
            group: {name: geometric(of[chosen], seed) for name, of in ratios.items()}
            for group, chosen in groups.items()
        }
        judged.append({**asdict(result), "test": own.pop("all"), "families": own})
    every = {group: geometric(fixed.speedup[chosen], seed) for group, chosen in groups.items()}
    highest = judged[tuned.results.index(tuned.best)]
    return {
        "schema": SCHEMA,
        "complete": tuned.complete,
        "split": {**split, "judged": trace.prompts},
        "costs": cell.to_json(),
        "controllers": judged,
        "best_fixed": {
            "spec": tuned.fixed.best,
            "overall": every.pop("all"),
            "families": every,
        },
        "recommended": choose(tuned, highest, trace, cell, free=free, seed=seed),
    }


def settings_with(controller: str, trace: Trace, about: Mapping[str, Any]) -> Settings:
    """A controller, and the draft it was tuned with if it has a Hugging Face id."""
    draft = trace.about.get("draft")
    name = str(draft.get("name")) if isinstance(draft, Mapping) else ""
    return Settings(controller=controller, draft=name if "/" in name else None, about=about)


def halves(trace: Trace) -> tuple[Trace, Trace, str]:
    """Prompts to search on, prompts to judge on, and how they were split, in words.

    If every id names its split, "val" or "test" between other marks, and both occur, by
    that. Else every other prompt of each family; prompts that occur twice stay together.
    `SettingError` if there is only one prompt."""
    sides = [_side(text) for text in trace.ids]
    if None not in sides and len(set(sides)) == 2:
        test = np.array([side == "test" for side in sides])
        return trace.take(~test), trace.take(test), "the ids' own splits"
    keys = list(zip(trace.families, trace.ids, strict=True))
    order = sorted(dict.fromkeys(keys), key=lambda key: trace.families.index(key[0]))
    if len(order) < 2:
        raise SettingError("one prompt cannot be halved; name other prompts as `test`")
    later = set(order[1::2])
    test = np.array([key in later for key in keys])
    return trace.take(~test), trace.take(test), "every other prompt of each family"


def _side(text: str) -> str | None:
    """The split an id names."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    named = {"val": "val", "validation": "val", "test": "test"}
    sides = {named[word] for word in words if word in named}
    return sides.pop() if len(sides) == 1 else None


def disjoint(trace: Trace, test: Trace) -> None:
    """Raise `SettingError` if a prompt is in both traces."""

    def keys(of: Trace) -> set[tuple[str, str, int, bytes]]:
        """What identifies the prompts; the ids alone may be line numbers."""
        named = zip(of.families, of.ids, of.prompt_tokens.tolist(), strict=True)
        texts = (tokens[:size].tobytes() for tokens, size in zip(of.tokens, of.sizes, strict=True))
        return {(*name, text) for name, text in zip(named, texts, strict=True)}

    if shared := keys(trace) & keys(test):
        name = sorted(key[1] for key in shared)[0]
        raise SettingError(
            f"{len(shared)} prompts are in both traces ({name} for one); what was searched on "
            "cannot judge"
        )


def without(controller: Controller) -> dict[str, Controller]:
    """The controller without each of its mechanisms, by name: its fields, and those of policies in
    it, that declare a value at which they do nothing (`controllers.base.mechanism`)."""
    assert is_dataclass(controller), "a controller is one"
    out: dict[str, Controller] = {}
    for field in fields(controller):
        value = getattr(controller, field.name)
        changed: dict[str, Any] = {}
        if "off" in field.metadata:
            changed = {field.name: field.metadata["off"]}
        elif isinstance(value, Controller):
            changed = {f"{field.name}.{name}": inner for name, inner in without(value).items()}
        for name, new in changed.items():
            out[name] = replace(controller, **{field.name: new})
    return out


def worth(
    trace: Trace, controller: Controller, costs: Cell, seed: int = 0
) -> dict[str, dict[str, float]]:
    """What the total speed becomes without each mechanism: under "" the controller's own `speedup`;
    by mechanism `change`, `low` and `high`: speed without it over speed with it, less 1, with a
    95 % bootstrap interval over prompts. All prompts are requests of one engine, in a random order,
    so that what is carried counts."""
    order = np.random.default_rng(seed).permutation(trace.prompts)
    whole = stream(trace, controller, costs, order)
    out = {"": {"speedup": float(whole.plain_seconds.sum() / whole.seconds.sum())}}
    for name, less in without(controller).items():
        ratio = rate(whole.seconds, stream(trace, less, costs, order).seconds, seed)
        ends = {"change": "mean", "low": "low", "high": "high"}
        out[name] = {ours: ratio[theirs] - 1 for ours, theirs in ends.items()}
    return out
