"""SpecBound's settings: searched by exact counts and their costs, confirmed by the clock."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.drafters.specbound import DEFAULTS, SpecBound, SpecBoundDrafter
from forerun.engine import Completion, Sampling
from forerun.errors import PromptError, SettingError, require
from forerun.lab.exits.exit_replay import ANNEALS, COUNTED, ExitTrace, OwnText, Setting
from forerun.lab.provenance import versions
from forerun.lab.traces.costs import least_squares
from forerun.lab.traces.results import geometric, mean_speed
from forerun.lab.traces.spaces import Integer, OneOf, Real, Search, Space, sampled
from forerun.model import Model
from forerun.prompts import Prompt
from forerun.runtime.base import Rows
from forerun.runtime.drafts import own_draft
from forerun.runtime.exits import LayersExecutor, Work, layers_of
from forerun.runtime.heads import ExitHeads, load_heads
from forerun.settings import Settings
from forerun.types import FloatArray

SCHEMA = 1
LIVE_TEXTS = 6  # texts that are decoded for the costs
LIVE_TOKENS = 32  # most tokens of each
SHOWN = 8  # settings listed
MOST_LAYERS = 12  # most exit layers that are tried; of more, evenly spaced ones
WIDTH = 12  # most tokens per round that are tried
GRID = tuple(round(0.05 * step, 2) for step in range(21))  # thresholds shown around the best one

Tell = Callable[[int, int], None]  # gets what is done, and all there is
ExitCosts = dict[str, float]
"""Seconds at batch size 1 of one of what `ExitTrace.counts` counts: `layers`, one layer, for a
token or for several at once; `exits`, one exit: its head, and whether its confidence suffices;
`steps`, one token that climbs, beyond the above: the engine's work on it, a wider pass; `rounds`,
one round, beyond the above: the last projection, the engine; and `plain`, one plain token."""


@dataclass(frozen=True)
class TimedText:
    """One generation; of each round, the first of which includes reading the prompt:"""

    completion: Completion
    seconds: FloatArray  # `(rounds, 2)`, by the clock of `_clock` and by the wall
    work: list[Work]  # what it ran, if the model drafts for itself

    @property
    def pace(self) -> FloatArray | None:
        """`(2,)` seconds per token after the first round; None: there was no other."""
        tokens = sum(r.committed for r in self.completion.rounds[1:])
        return self.seconds[1:].sum(0) / tokens if tokens else None


def timed(model: Model, text: OwnText, setting: Setting | None) -> TimedText:
    """Decode a prompt with a model that speculates by a setting, or plainly without one."""
    clock, counted = _clock(model.target.device), getattr(model.target.executor, "work", Work())
    marks, work, completion = [(clock(), time.perf_counter())], [Work(counted)], None
    for event in model.stream(
        [text.prompt],
        controller="fixed(0)" if setting is None else setting.controller,
        sampling=text.sampling,
        plain=setting is None,
    ):
        marks.append((clock(), time.perf_counter()))
        work.append(Work(counted))
        completion = event.completion
    assert completion is not None
    rounds = [Work(after - before) for before, after in pairwise(work)]
    return TimedText(completion, np.diff(marks, axis=0), rounds)


def _clock(device: torch.device) -> Callable[[], float]:
    """On one thread of a CPU its own time, which other processes disturb little; else the wall's.
    The engine reads what a GPU computed at the end of every round, so the wall needs no waiting."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _varied(layers: Sequence[int], width: int) -> Iterator[Setting]:
    """Settings that differ in how many tokens climb, how often they stop, and how far they go."""
    middle = layers[len(layers) // 2]
    yield Setting((layers[0],), 0.0, ANNEALS[0], min(4, width))
    yield Setting((middle,), 0.5, ANNEALS[0], width)
    yield Setting((layers[0],), 0.9, ANNEALS[0], width)
    yield Setting(tuple(n for n in layers if n <= middle), 0.5, ANNEALS[0], min(4, width))
    yield Setting(tuple(layers), 0.8, ANNEALS[0], width)


def _fit(samples: list[tuple[list[float], float]]) -> list[float]:
    """Least squares with no cost below 0, without outliers (from other processes). Takes pairs of
    what was counted and the seconds it took; gives seconds per unit of each count."""
    columns: FloatArray = np.array([row for row, _ in samples], dtype=float)
    values: FloatArray = np.array([value for _, value in samples])
    keep = np.ones(len(values), dtype=bool)
    costs = np.zeros(columns.shape[1])
    for _ in range(4):
        costs = least_squares(columns[keep], values[keep])
        off = np.abs(values - columns @ costs)
        keep = off <= 4 * max(float(np.median(off)), 1e-9)
    return [float(v) for v in costs]


class ExitSearch(Search[Setting]):
    """Settings tried on recorded texts, each at the cost of counting; scored by the predicted
    speed-up over plain decoding, a geometric mean over the texts."""

    def __init__(self, exits: ExitTrace, costs: ExitCosts, width: int = WIDTH) -> None:
        super().__init__(self._speed)
        self.exits, self.costs, self.width = exits, costs, width

    def _speed(self, setting: Setting) -> float:
        plain = np.array([len(text.output) for text in self.exits.texts]) * self.costs["plain"]
        return mean_speed(plain / sum(self._seconds(setting).values()))

    def _seconds(self, setting: Setting) -> dict[str, Any]:
        """`(texts,)` by what is counted."""
        counts = self.exits.counts(setting)
        return {name: self.costs[name] * number for name, number in counts.items()}

    def parts(self, setting: Setting) -> dict[str, float]:
        """Share of the time of each part."""
        parts = {name: seconds.sum() for name, seconds in self._seconds(setting).items()}
        return {name: float(took / sum(parts.values())) for name, took in parts.items()}

    def top(self, count: int) -> list[Setting]:
        """The best settings that differ in more than threshold and annealing, best first."""
        settings: dict[tuple[tuple[int, ...], int], Setting] = {}
        for setting in sorted(self.scores, key=self.scores.__getitem__, reverse=True):
            settings.setdefault((setting.layers, setting.width), setting)
        return list(settings.values())[:count]

    def sweep(self, budget: int, seed: int = 0, tell: Tell = lambda *_: None) -> Setting:
        """`budget` trials as in `tune`; the best."""
        require(budget >= 1, "budget", budget, "≥ 1")
        layers, switch = self.exits.layers, OneOf((False, True))
        toggles = {layer: f"layer {layer}" for layer in layers[:-1]}
        space: Space = {
            "deepest": Integer(0, len(layers) - 1),
            "threshold": Real(0, 1),
            "anneal": OneOf(ANNEALS),
            "width": Integer(1, self.width),
            "bonus": switch,
            **dict.fromkeys(toggles.values(), switch),
        }
        alone: dict[str, Any] = dict.fromkeys(toggles.values(), False)
        alone |= {"threshold": 0.5, "anneal": ANNEALS[0], "width": min(4, self.width)}
        # First one exit alone, at each layer in turn from the middle outwards.
        middle_first = sorted(range(len(layers)), key=lambda n: abs(n - len(layers) // 2))
        starts = [{**alone, "deepest": n} for n in middle_first]

        def made(values: Mapping[str, Any]) -> Setting:
            used = [layer for layer in layers[: values["deepest"]] if values[toggles[layer]]]
            threshold, *rest = (values[n] for n in ("threshold", "anneal", "width", "bonus"))
            return Setting((*used, layers[values["deepest"]]), round(threshold, 2), *rest)

        self.run(sampled(space, 0, budget, seed, starts), made, lambda done: tell(done, budget))
        return self.best

    def sensitivity(self, of: Setting) -> dict[str, list[tuple[float | int | str, float]]]:
        """Per parameter its values and the predicted speed-up, the others as they are; of `layers`,
        each left out or added."""
        every, used = self.exits.layers, of.layers
        up_to = {d: (*(n for n in used[:-1] if n < d), d) for d in every}
        toggled: dict[str, tuple[int, ...]] = {}
        for layer in every:
            if layer not in used:
                toggled[f"+{layer}"] = tuple(sorted((*used, layer)))
            elif len(used) > 1:
                toggled[f"-{layer}"] = tuple(n for n in used if n != layer)
        thresholds = sorted({*GRID, of.threshold})
        changes: dict[str, list[tuple[float | int | str, Setting]]] = {
            "threshold": [(t, replace(of, threshold=t)) for t in thresholds],
            "anneal": [(a, replace(of, anneal=a)) for a in ANNEALS],
            "depth": [(d, replace(of, layers=layers)) for d, layers in up_to.items()],
            "width": [(w, replace(of, width=w)) for w in range(1, self.width + 1)],
            "layers": [(name, replace(of, layers=layers)) for name, layers in toggled.items()],
            "bonus": [(b, replace(of, bonus=b)) for b in (True, False)],
        }
        return {
            name: [(value, round(self.score(s), 4)) for value, s in pairs]
            for name, pairs in changes.items()
        }


def untuned(layers: Sequence[int], depths: int, trained: bool) -> Setting | None:
    """The setting of `specbound` without arguments; None if it refuses."""
    try:
        used = SpecBound(exits="trained" if trained else "").exit_layers(depths, tuple(layers))
    except SettingError:  # no head is shallow enough
        return None
    return Setting(used, *DEFAULTS.values())


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
        self._exits = exits or (None if trained else "")
        """As a spec names the heads: the target's own need none, but that none are used is said."""
        self._model, self._width, self._seed = model, width, seed
        self._fast = Rows(LayersExecutor(model.target.executor.module()))
        self._trained = bool(trained)
        access = layers_of(self._fast).access
        self._heads: Any = load_heads(trained, access) if trained else ExitHeads(access)
        self.search: ExitSearch | None = None  # those scored; there once costs are measured
        self._fastest: Setting | None = None

    def run(
        self,
        prompts: Sequence[Prompt],
        budget: int,
        confirmed: int,
        about: Mapping[str, Any],
        tell: Callable[..., None],
    ) -> dict[str, Any]:
        """Write, time, search and confirm: the document of `sweep specbound`. `tell` is called with
        the name of a phase, what is done of it, and how much there is."""
        heads, began = self._heads, time.perf_counter()
        layers = candidates(tuple(heads.layers))
        texts: list[OwnText] = []
        for text in written(self._model, ((row.ids, row.sampling) for row in prompts)):
            texts.append(text)
            tell("writing", len(texts))
        costs = self.measure(layers, texts, partial(tell, "timing"))
        exits = ExitTrace.record(heads, layers, texts)
        self.search = search = ExitSearch(exits, costs, self._width)
        best = search.sweep(budget, self._seed, partial(tell, "searching"))
        chosen, spec = search.top(confirmed), methodcaller("spec", self._exits)
        usual = untuned(tuple(heads.layers), heads.access.layers, self._trained)
        if usual is not None and set(usual.layers) <= set(layers):
            search.score(usual)
            chosen += [usual] * (usual not in chosen)
        live = self.confirm(search, chosen, partial(tell, "confirming"))
        fastest, figures = next(iter(live.items()))
        self._fastest = fastest
        return {
            "schema": SCHEMA,
            "draft": spec(fastest),
            "controller": fastest.controller,
            "top": [
                {"draft": spec(setting), "predicted": round(search.score(setting), 4)}
                for setting in search.top(SHOWN)
            ],
            "confirmed": [{"draft": spec(setting), **own} for setting, own in live.items()],
            "untuned": None if usual is None else spec(usual),
            "time": {name: round(x, 4) for name, x in search.parts(fastest).items()},
            "sensitivity": search.sensitivity(fastest),
            "costs_ms": {name: round(seconds * 1e3, 4) for name, seconds in costs.items()},
            "tried": len(search.scores),
            "positions": exits.positions,
            "about": {
                **about,
                "seconds": round(time.perf_counter() - began, 1),
                "prompts_used": len(prompts),
                "settings": fastest.settings(),
                "speedup": figures["speedup"],
                "predicted": figures["predicted"],
                "best_predicted": spec(best),
                "versions": versions(),
            },
        }

    def measure(
        self, layers: Sequence[int], texts: Sequence[OwnText], tell: Tell = lambda *_: None
    ) -> ExitCosts:
        """Fit costs to live rounds of a few of the texts that differ in what they run; `tell` gets
        the texts done and their number. `PromptError` if no text lasts for two rounds."""
        sample = [*texts[:: max(1, len(texts) // LIVE_TEXTS)]][:LIVE_TEXTS]
        seen: list[tuple[list[float], float]] = []
        alone: list[float] = []
        for number, text in enumerate(sample, 1):
            most = min(LIVE_TOKENS, len(text.output))
            short = replace(text, sampling=replace(text.sampling, max_new_tokens=most))
            for setting in _varied(layers, max(self._width, DEFAULTS["width"])):
                done = timed(self._speculating(setting), short, setting)
                for work, seconds in [*zip(done.work, done.seconds[:, 0], strict=True)][1:]:
                    ran, asked = work.calls("draft", "verify"), work.calls("exit")
                    counted = [float(ran), float(asked), float(work.passes("step")), 1.0]
                    seen.append((counted, seconds))
            alone += timed(self._model, short, None).seconds[1:, 0].tolist()
            tell(number, len(sample))
        if not seen or not alone:
            raise PromptError("the texts are too short to time; give more prompts or more tokens")
        [plain] = _fit([([1.0], seconds) for seconds in alone])
        return {**dict(zip(COUNTED, _fit(seen), strict=True)), "plain": plain}

    def confirm(
        self, search: ExitSearch, settings: Sequence[Setting], tell: Tell = lambda *_: None
    ) -> dict[Setting, dict[str, Any]]:
        """Decode every text with every setting and plainly, side by side; of each, the fastest
        first, its figures as an entry of `confirmed` (docs/json.md). `SettingError` if no text
        lasted for more than a round."""
        texts = search.exits.texts
        methods = [(self._model, None), *((self._speculating(s), s) for s in settings)]
        runs: list[list[TimedText]] = [[] for _ in methods]
        for number, text in enumerate(texts):
            for step in range(len(methods)):
                at = (step + number) % len(methods)  # no method always follows the same one
                runs[at].append(timed(methods[at][0], text, methods[at][1]))
                tell(number * len(methods) + step + 1, len(texts) * len(methods))
        out: dict[Setting, dict[str, Any]] = {}
        for setting, own in zip(settings, runs[1:], strict=True):
            pairs = list(zip(runs[0], own, strict=True))
            paces = [(a.pace, b.pace) for a, b in pairs]
            ratios = [a / b for a, b in paces if a is not None and b is not None]
            if not ratios:
                raise SettingError("the texts end within a round; give prompts with longer answers")
            speedup, wall = map(geometric, np.stack(ratios, 1))
            done = [one.completion.stats for one in own]
            tokens = sum(stats.tokens for stats in done)
            rounds = sum(stats.rounds for stats in done)
            out[setting] = {
                "predicted": round(search.score(setting), 4),
                "speedup": speedup,  # on one CPU thread by its own time, else by the wall
                "wall": wall,
                "tokens_per_round": round(tokens / rounds, 4),
                "same": sum(a.completion.tokens == b.completion.tokens for a, b in pairs),
            }
        return dict(sorted(out.items(), key=lambda pair: -pair[1]["speedup"]["mean"]))

    def _speculating(self, setting: Setting) -> Model:
        """The model with a setting of specbound; all such models share rows."""
        drafter = SpecBoundDrafter(self._fast, self._heads, *astuple(setting))
        speculative = Model(self._fast, drafter, self._model.tokenizer)
        speculative.eos = self._model.eos
        return speculative

    @property
    def best(self) -> Setting | None:
        """The fastest by the clock, or before that is known the best by prediction so far."""
        scored = self.search is not None and self.search.scores
        return self._fastest or (self.search.best if self.search and scored else None)

    def settings(self, about: Mapping[str, Any]) -> Settings:
        """What `generate` takes to run `best`; exit heads are named by their whole path."""
        assert self.best is not None, "a setting was scored"
        draft = self.best.spec(self._exits and str(Path(self._exits).resolve()))
        return Settings(controller=self.best.controller, draft=draft, about=about)
