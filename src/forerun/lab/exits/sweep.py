"""Choosing SpecBound's settings: searched by exact counts, confirmed by the clock."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forerun.drafters.specbound import SpecBound
from forerun.engine import Sampling
from forerun.errors import SettingError, require
from forerun.lab.exits.exit_costs import ExitCosts, TimedText, measure, speculating, timed
from forerun.lab.exits.exit_replay import ANNEALS, ExitTrace, OwnText, Setting
from forerun.lab.provenance import versions
from forerun.lab.traces.results import geometric
from forerun.lab.traces.spaces import Integer, OneOf, Real, Space, sampled
from forerun.model import Model
from forerun.prompts import Prompt
from forerun.runtime.base import Rows
from forerun.runtime.drafts import own_draft
from forerun.runtime.exits import exit_rows, layers_of
from forerun.runtime.heads import load_heads
from forerun.runtime.layers import ExitHeads, LogitLens

SCHEMA = 1
SHOWN = 8  # settings listed
MOST_LAYERS = 12  # most exit layers that are tried; of more, evenly spaced ones
WIDTH = 12  # most tokens per round that are tried
UNTUNED = 6  # width of `specbound` without settings, which is scored, too
GRID = tuple(round(0.05 * step, 2) for step in range(21))  # thresholds shown around the best one
POLISHED = 40  # most steps of the local search from the best trial


@dataclass
class Search:
    """Settings tried on recorded texts, each at the cost of counting."""

    exits: ExitTrace
    costs: ExitCosts
    width: int = WIDTH
    scores: dict[Setting, float] = field(default_factory=dict, init=False)
    """Predicted speed-up over plain decoding: a geometric mean over the texts."""

    def score(self, setting: Setting) -> float:
        """The geometric mean of the texts' speed-ups, once per setting."""
        if setting not in self.scores:
            plain = np.array([len(text.output) for text in self.exits.texts]) * self.costs.plain
            ratios = plain / self.costs.seconds(self.exits.counts(setting))
            self.scores[setting] = float(np.exp(np.log(ratios).mean()))
        return self.scores[setting]

    def parts(self, setting: Setting) -> dict[str, float]:
        """Share of the time of each part."""
        parts = self.costs.parts(self.exits.counts(setting))
        total = sum(seconds.sum() for seconds in parts.values())
        return {name: float(seconds.sum() / total) for name, seconds in parts.items()}

    def best(self) -> Setting:
        """The best so far; the first one of equals."""
        return max(self.scores, key=self.scores.__getitem__)

    def top(self, count: int) -> list[Setting]:
        """The best settings that differ in more than threshold and annealing, best first."""
        settings: dict[tuple[tuple[int, ...], int], Setting] = {}
        for setting in sorted(self.scores, key=self.scores.__getitem__, reverse=True):
            settings.setdefault((setting.layers, setting.width), setting)
        return list(settings.values())[:count]

    def run(
        self, budget: int, seed: int = 0, tell: Callable[[int, int], None] = lambda *_: None
    ) -> Setting:
        """`budget` trials as in `tune`, then single changes of the best while they help."""
        require(budget >= 1, "budget", budget, "≥ 1")
        layers, switch = self.exits.layers, OneOf((False, True))
        space: Space = {
            "deepest": Integer(0, len(layers) - 1),
            "threshold": Real(0, 1),
            "anneal": OneOf(ANNEALS),
            "width": Integer(1, self.width),
            "bonus": switch,
            **{f"layer {layer}": switch for layer in layers[:-1]},
        }
        alone: dict[str, Any] = {f"layer {layer}": False for layer in layers[:-1]}
        alone |= {"threshold": 0.5, "anneal": ANNEALS[0], "width": min(4, self.width)}
        # First one exit alone, at each layer in turn from the middle outwards.
        middle_first = sorted(range(len(layers)), key=lambda n: abs(n - len(layers) // 2))
        starts = [{**alone, "deepest": n} for n in middle_first]
        for number, (values, answer) in enumerate(sampled(space, 0, budget, seed, starts), 1):
            last = values["deepest"]
            used = [layer for layer in layers[:last] if values[f"layer {layer}"]]
            threshold, *rest = (values[n] for n in ("threshold", "anneal", "width", "bonus"))
            answer(self.score(Setting((*used, layers[last]), round(threshold, 2), *rest)))
            tell(number, budget)
        best = self.best()
        for _ in range(POLISHED):
            better = max(self._around(best), key=self.score)
            if self.score(better) <= self.score(best):
                break
            best = better
        return best

    def _around(self, of: Setting) -> list[Setting]:
        """Settings that differ in one parameter."""
        near = {round(of.threshold + step / 100, 2) for step in (-10, -5, -2, -1, 1, 2, 5, 10)}
        changes = self.changes(of)
        changes["threshold"] = [(t, replace(of, threshold=t)) for t in sorted(near) if 0 <= t <= 1]
        return [setting for pairs in changes.values() for _, setting in pairs]

    def changes(self, of: Setting) -> dict[str, list[tuple[float | int | str, Setting]]]:
        """Values of each parameter with the rest as it is; of `layers`, each left out or added."""
        every, used = self.exits.layers, of.layers
        up_to = {d: (*(n for n in used[:-1] if n < d), d) for d in every}
        toggled: dict[str, tuple[int, ...]] = {}
        for layer in every:
            if layer not in used:
                toggled[f"+{layer}"] = tuple(sorted((*used, layer)))
            elif len(used) > 1:
                toggled[f"-{layer}"] = tuple(n for n in used if n != layer)
        thresholds = sorted({*GRID, of.threshold})
        return {
            "threshold": [(t, replace(of, threshold=t)) for t in thresholds],
            "anneal": [(a, replace(of, anneal=a)) for a in ANNEALS],
            "depth": [(d, replace(of, layers=layers)) for d, layers in up_to.items()],
            "width": [(w, replace(of, width=w)) for w in range(1, self.width + 1)],
            "layers": [(name, replace(of, layers=layers)) for name, layers in toggled.items()],
            "bonus": [(b, replace(of, bonus=b)) for b in (True, False)],
        }

    def sensitivity(self, of: Setting) -> dict[str, list[tuple[float | int | str, float]]]:
        """Per parameter its values and the predicted speed-up, the others as they are."""
        changes = self.changes(of).items()
        return {name: [(value, self.score(s)) for value, s in pairs] for name, pairs in changes}


@dataclass(frozen=True)
class Confirmed:
    """A setting by the clock."""

    setting: Setting
    predicted: float
    speedup: dict[str, float]
    """Over plain decoding, a geometric mean; on one CPU thread by its own time, else wall."""
    wall: dict[str, float]
    per_round: float  # tokens committed per round
    same: int  # texts that equal plain decoding's

    def to_json(self, exits: str | None = None) -> dict[str, Any]:
        return {
            "draft": self.setting.spec(exits),
            "predicted": round(self.predicted, 4),
            "speedup": self.speedup,
            "wall": self.wall,
            "tokens_per_round": round(self.per_round, 4),
            "same": self.same,
        }


def confirm(
    model: Model,
    rows: Rows,
    heads: ExitHeads,
    search: Search,
    settings: Sequence[Setting],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Confirmed]:
    """Decode every text with every setting and plainly, side by side; the fastest first.
    `SettingError` if no text lasted for more than a round."""
    texts = search.exits.texts
    methods = [None, *settings]
    models = [model, *(speculating(model, rows, heads, s) for s in settings)]
    runs: list[list[TimedText]] = []
    for number, text in enumerate(texts):
        row: list[TimedText | None] = [None] * len(methods)
        for step in range(len(methods)):
            at = (step + number) % len(methods)  # no method always follows the same one
            row[at] = timed(models[at], text, methods[at])
            tell(number * len(methods) + step + 1, len(texts) * len(methods))
        runs.append([done for done in row if done is not None])
    plain = [row[0].completion for row in runs]
    out = []
    for at, setting in enumerate(settings, start=1):
        pairs = [(row[0].pace, row[at].pace) for row in runs]
        paces = [(slow, own) for slow, own in pairs if slow is not None and own is not None]
        if not paces:
            raise SettingError("the texts end within a round; give prompts with longer answers")
        done = [row[at].completion for row in runs]
        out.append(
            Confirmed(
                setting,
                search.score(setting),
                geometric([slow[0] / own[0] for slow, own in paces]),
                geometric([slow[1] / own[1] for slow, own in paces]),
                sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done),
                sum(c.tokens == p.tokens for c, p in zip(done, plain, strict=True)),
            )
        )
    return sorted(out, key=lambda c: c.speedup["mean"], reverse=True)


def untuned(layers: Sequence[int], depths: int, trained: bool) -> Setting | None:
    """The setting of `specbound` without arguments; None if it refuses."""
    try:
        used = SpecBound(exits="trained" if trained else "").exit_layers(depths, tuple(layers))
    except SettingError:  # no head is shallow enough
        return None
    return Setting(used, 0.7, 0.5, UNTUNED)


def candidates(layers: Sequence[int]) -> tuple[int, ...]:
    """Exit layers to try: these, or of too many, evenly spaced ones.

    >>> candidates(range(1, 12)), candidates(range(1, 32))
    ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), (3, 6, 9, 12, 15, 18, 21, 24, 27, 30))
    """
    every = -(-len(layers) // MOST_LAYERS)
    return tuple(layers[every - 1 :: every])


def written(model: Model, prompts: Iterable[tuple[list[int], Sampling]]) -> Iterator[OwnText]:
    """The model's own texts on prompts, given as token ids and sampling."""
    for ids, sampling in prompts:
        done = model.generate([ids], sampling=sampling, plain=True)[0]
        eos = model.eos if sampling.eos is None else frozenset(sampling.eos)
        sampling = replace(sampling, seed=done.seed)
        yield OwnText(ids, done.tokens, sampling, frozenset() if sampling.ignore_eos else eos)


class Sweep:
    """The settings of `specbound` that suit a model, on torch, and its exit heads. `exits` is their
    folder; None takes the target's own, if it has any, and "" the model's own head at every layer.
    Up to `width` drafted tokens per round are tried."""

    def __init__(self, model: Model, exits: str | None, *, width: int = WIDTH, seed: int = 0):
        trained = own_draft(model.target.facts.name, "exits") if exits is None else exits
        self.exits = exits or (None if trained else "")
        """As a spec names the heads: the target's own need none, but that none are used is said."""
        self._model, self._width, self._seed = model, width, seed
        self._module: Any = model.target.executor.module()
        self._fast, self._trained = exit_rows(self._module), bool(trained)
        self._access = layers_of(self._fast).access
        self._heads: Any = load_heads(trained, self._access) if trained else LogitLens(self._access)
        self.search: Search | None = None  # those scored; there once costs are measured
        self.best: Any = None  # the setting with the best prediction
        self.untuned: Setting | None = None

    def run(
        self, prompts: Sequence[Prompt], budget: int, confirmed: int, tell: Callable[..., None]
    ) -> list[Confirmed]:
        """Write, time, search and confirm; the settings timed, the fastest first. `tell` is called
        with the name of a phase, what is done of it, and how much there is."""
        model, heads = self._model, self._heads
        layers = candidates(tuple(heads.layers))
        texts: list[OwnText] = []
        for text in written(model, ((row.ids, row.sampling) for row in prompts)):
            texts.append(text)
            tell("writing", len(texts))
        advance = partial(tell, "timing")
        widest = max(self._width, UNTUNED)
        costs = measure(model, self._fast, heads, layers, texts, widest, advance)
        exits = ExitTrace.record(self._access, heads, layers, texts)
        self.search = search = Search(exits, costs, self._width)
        self.best = search.run(budget, self._seed, partial(tell, "searching"))
        chosen = search.top(confirmed)
        self.untuned = untuned(tuple(heads.layers), self._access.layers, self._trained)
        if self.untuned is not None and set(self.untuned.layers) <= set(layers):
            search.score(self.untuned)
            if self.untuned not in chosen:
                chosen.append(self.untuned)
        return confirm(model, self._fast, heads, search, chosen, partial(tell, "confirming"))

    def save(self, path: str, setting: Setting, about: Mapping[str, Any]) -> None:
        """Write the settings file: for `generate`, on any machine."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "controller": setting.controller,
            "rule": None,
            "draft": setting.spec(None if self.exits else self.exits),
        }
        if self.exits:
            document["exits"] = os.path.relpath(self.exits, Path(path).parent)
        document["about"] = about
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def document(self, live: list[Confirmed], about: Mapping[str, Any]) -> dict[str, Any]:
        """The document of `sweep specbound`: the fastest settings, and the effect of changes."""
        search, fastest = self.search, live[0]
        assert search is not None
        return {
            "schema": SCHEMA,
            "draft": fastest.setting.spec(self.exits),
            "controller": fastest.setting.controller,
            "top": [
                {"draft": setting.spec(self.exits), "predicted": round(search.score(setting), 4)}
                for setting in search.top(SHOWN)
            ],
            "confirmed": [c.to_json(self.exits) for c in live],
            "untuned": None if self.untuned is None else self.untuned.spec(self.exits),
            "time": {name: round(x, 4) for name, x in search.parts(fastest.setting).items()},
            "sensitivity": {
                name: [[value, round(score, 4)] for value, score in values]
                for name, values in search.sensitivity(fastest.setting).items()
            },
            "costs_ms": search.costs.to_json(),
            "tried": len(search.scores),
            "positions": search.exits.positions,
            "about": {
                **about,
                "settings": fastest.setting.settings(),
                "speedup": fastest.speedup,
                "predicted": round(fastest.predicted, 4),
                "best_predicted": self.best.spec(self.exits),
                "versions": versions(),
            },
        }
