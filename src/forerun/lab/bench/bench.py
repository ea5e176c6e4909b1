"""Methods that continue prompts, measured paired and interleaved: each on every prompt.

A *group* is a batch of prompts decoded together. Per group all methods run in turn, in an order
drawn for it: a machine that gets slower or faster favours none, and none always finds in the caches
what the same other one has left. A group counts once every method has run on it: what is compared
is always paired.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forerun.cache import write_json
from forerun.errors import PromptError, SettingError
from forerun.lab.bench.peers import Kind, Peer, Run
from forerun.lab.bench.report import PLAIN, Cell, cells, render
from forerun.prompts import Prompt

if TYPE_CHECKING:
    from forerun.model import Model

SCHEMA = 1
FILE, PAGE = "results.json", "report.html"  # of the results, in their folder
WARM_UP = 12  # tokens written, per method and batch size, before anything counts
SAVE_EVERY = 15.0  # seconds between two writes of the results while measuring


@dataclass(frozen=True)
class Ours:
    """Our engine with one controller and one rule, or decoding plainly."""

    name: str
    model: Model
    controller: Any = None  # None is plain decoding: the target alone, through the same engine
    rule: Any = "gumbel"
    sampled: bool = False  # whether prompts are sampled, not decoded greedily

    largest_batch: ClassVar[int | None] = None  # there is no limit

    @property
    def kind(self) -> Kind:
        """Plain decoding, one of ours, or a peer."""
        return "plain" if self.controller is None else "forerun"

    @property
    def certain(self) -> bool:
        """Whether it tosses no coins, so that its texts can be compared with plain decoding's."""
        from forerun.rules import RULES

        plain = self.controller is None
        return plain or not self.sampled or RULES.make(self.rule).gumbel_max

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Continue these prompts together, timed."""
        plain = self.controller is None
        began = time.perf_counter()
        done = self.model.generate(
            [p.ids for p in prompts],
            controller="fixed(0)" if plain else self.controller,
            rule=None if plain else self.rule,
            sampling=[p.sampling for p in prompts],
            batch_size=len(prompts),
            plain=plain,
        )
        seconds = time.perf_counter() - began
        lengths = Counter(r.accepted for c in done for r in c.rounds)
        names = "first_token_seconds", "rounds", "drafted", "accepted"
        ttft, rounds, drafted, accepted = ([getattr(c.stats, n) for c in done] for n in names)
        tokens, kept = [c.tokens for c in done], dict(sorted(lengths.items()))
        return Run(seconds, tokens, ttft, rounds, drafted, accepted, kept)

    def about(self) -> dict[str, Any]:
        """Name, kind and settings, for the results."""
        from forerun.controllers import CONTROLLERS
        from forerun.rules import RULES

        out: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.controller is not None:
            rule = RULES.make(self.rule)
            out["controller"] = CONTROLLERS.text(CONTROLLERS.make(self.controller))
            out |= {"rule": RULES.text(rule), "lossless": rule.lossless}
        return out


Method = Ours | Peer  # something that continues prompts
Group = tuple[Prompt, ...]  # prompts of one family that are decoded together


def key(group: Group) -> tuple[Any, ...]:
    """Identifies a group in another run: its size, its family and its prompts."""
    return (len(group), str(group[0].family), *(p.id for p in group))


def groups(prompts: Sequence[Prompt], batches: Sequence[int]) -> list[Group]:
    """The prompts of each family in batches of each size, families in turns; `PromptError` if a
    family has fewer than a batch."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(str(prompt.family), []).append(prompt)
    out = []
    for batch in batches:
        for family, own in families.items():
            if len(own) < batch:
                raise PromptError(
                    f"{len(own)} prompts of {family} do not fill a batch of {batch}; "
                    f"give at least {batch} per family (`prompts`), or a smaller `batch`"
                )
        most = max(len(own) for own in families.values()) // batch
        for turn in range(most):  # what does not fill a batch is left out
            for own in families.values():
                part = tuple(own[turn * batch : (turn + 1) * batch])
                if len(part) == batch:
                    out.append(part)
    return out


class Results:
    """The document `results.json` (docs/json.md) in its folder, written as it grows."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder, self.document = folder, document
        self._written = time.monotonic()

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: dict[str, Any],
        provenance: dict[str, Any],
        methods: Sequence[Method],
        skipped: Sequence[dict[str, str]] = (),
    ) -> Results:
        """New results, or those of an interrupted run of the same settings, to go on with;
        `SettingError` if the folder holds results of other settings."""
        folder.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "bench",
            "complete": False,
            "settings": settings,
            "provenance": [provenance],
            "methods": [m.about() for m in methods],
            "skipped": list(skipped),
            "samples": [],
        }
        if (folder / FILE).is_file():
            previous = load(folder)
            if _identity(previous) != _identity(json.loads(json.dumps(document))):
                raise SettingError(
                    f"{folder} holds the results of other settings, methods, models or versions; "
                    "name another folder"
                )
            document["samples"] = previous["samples"]
            document["provenance"] = [*previous["provenance"], provenance]
        return cls(folder, document)

    @property
    def done(self) -> set[tuple[Any, ...]]:
        return {(s["batch"], s["family"], *s["prompts"]) for s in self.document["samples"]}

    def add(self, group: Group, runs: dict[str, Run], same: Set[str]) -> None:
        """Keep a complete group; `same`: whose outputs are expected to equal plain's."""
        plain = runs[PLAIN].tokens
        for name, run in runs.items():
            pairs = zip(run.tokens, plain, strict=True)
            equal = [a == b for a, b in pairs] if name in same else None
            sample = {k: v for k, v in asdict(run).items() if k != "tokens"}
            sample |= {
                "method": name,
                "batch": len(group),
                "family": str(group[0].family),
                "prompts": [p.id for p in group],
                "tokens": [len(t) for t in run.tokens],
                "identical": equal,
                # So that two runs can be compared without their texts.
                "digest": [sha256(json.dumps(t).encode()).hexdigest()[:12] for t in run.tokens],
            }
            self.document["samples"].append(json.loads(json.dumps(sample)))
        if time.monotonic() - self._written > SAVE_EVERY:
            self.write()

    def skip(self, name: str, reason: str) -> None:
        """Leave a method out from now on, and drop its samples."""
        doc = self.document
        doc["skipped"].append({"name": name, "reason": reason})
        doc["samples"] = [s for s in doc["samples"] if s["method"] != name]

    def summary(self) -> dict[str, Any]:
        """The document with the figures of the samples, after `report`, in place of these."""
        return {k: v for k, v in self.document.items() if k != "samples"}

    def report(self) -> list[Cell]:
        """Write results and page of what there is; the figures."""
        figures = cells(self.document)
        self.document["summary"] = [
            {name: value for name, value in c.items() if name != "ratios"} for c in figures
        ]
        self.write()
        if figures:
            (self.folder / PAGE).write_text(render(self.document, figures), encoding="utf-8")
        return figures

    def write(self) -> None:
        write_json(self.folder / FILE, self.document)
        self._written = time.monotonic()


def measure(
    results: Results,
    work: Sequence[Group],
    methods: Sequence[Method],
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run what is not yet in `results`, group by group.

    A peer that fails is left out with its reason. Interrupted, what is complete is written before
    the interrupt goes on. The first method is plain decoding; `tell` is called with the
    runs done and their total.
    """
    done = results.done
    todo = [g for g in work if key(g) not in done]
    active = [m for m in methods if m.name not in {s["name"] for s in results.document["skipped"]}]
    total = _runs(work, active)
    count = total - _runs(todo, active)
    tell(count, total)
    warm: set[int] = set()
    try:
        for group in todo:
            if len(group) not in warm:
                _warm_up(results, group, active)
                warm.add(len(group))
            able = _able(active, len(group))
            finished: dict[str, Run] = {}
            for method in random.Random(repr(key(group))).sample(able, len(able)):
                run = _try(results, method, group, active)
                if run is not None:
                    finished[method.name] = run
                count += 1
                tell(count, total)
            ordered = {m.name: finished[m.name] for m in active if m.name in finished}
            results.add(group, ordered, {m.name for m in active if m.certain})
        results.document["complete"] = True
    finally:
        results.write()


def load(path: str | Path) -> dict[str, Any]:
    """Read results from a folder or a file; `SettingError` if they are none of `bench`'s."""
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"{file} is no results file of forerun bench: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != "bench":
        raise SettingError(f"{file} is no results file of forerun bench")
    if document.get("schema") != SCHEMA:
        raise SettingError(
            f"{file} has schema {document.get('schema')!r} and this forerun reads {SCHEMA}"
        )
    try:
        cells(document)
    except (KeyError, TypeError) as error:
        raise SettingError(f"{file} is damaged: {error!r}") from error
    return document


def _identity(document: dict[str, Any]) -> list[Any]:
    """The parts of a document that must be equal for a run to be continued."""
    newest = document["provenance"][-1]
    fixed = [newest.get(name) for name in ("target", "draft", "versions", "device", "dtype")]
    return [document["settings"], document["methods"], *fixed]


def _able(methods: Sequence[Method], batch: int) -> list[Method]:
    return [m for m in methods if m.largest_batch is None or m.largest_batch >= batch]


def _runs(groups: Sequence[Group], methods: Sequence[Method]) -> int:
    return sum(len(_able(methods, len(group))) for group in groups)


def _try(
    results: Results, method: Method, prompts: Sequence[Prompt], active: list[Method]
) -> Run | None:
    """One run; a peer that fails leaves `active`. Our own errors are not hidden."""
    try:
        return method.run(prompts)
    except Exception as error:
        if method.kind != "peer":
            raise
        first = " ".join(str(error).split())[:200]
        results.skip(method.name, f"failed on {prompts[0].id}: {type(error).__name__}: {first}")
        active.remove(method)
        return None


def _warm_up(results: Results, group: Group, active: list[Method]) -> None:
    short = [
        replace(p, sampling=replace(p.sampling, max_new_tokens=most))
        for p in group
        for most in [min(p.sampling.max_new_tokens, WARM_UP)]
    ]
    for method in _able(active, len(group)):
        _try(results, method, short, active)
