"""CM-ASD where it was written for: translation by an encoder-decoder model, Tables I-V in kind."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu

import forerun
from benchmarks.cmasd import ONE, Run, relative
from benchmarks.common import RESULTS, interleaved, provenance, save, table
from benchmarks.quality import bar
from forerun.lab.bench.peers import Peer, TransformersAssisted, TransformersBeam, TransformersPlain
from forerun.zoo.corpus import read_pairs

PLAIN, BEAM = "plain greedy", "beam 5"
FULL, TWO = "cm-asd", "cm-asd(two_pass=true)"
METHODS: dict[str, tuple[str, str, str] | None] = {
    BEAM: None,
    "transformers, greedy": None,
    "transformers, assisted": None,
    PLAIN: ("none", "fixed(0)", "standard"),
    **{f"blockwise (k = {k}, exact)": ("block", f"fixed({k})", "standard") for k in (3, 5, 8)},
    "adaptive k, exact": ("block", TWO, "standard"),
    **{
        f"Spec-Verification (SpecDec; k = {k}, fixed τ)": (
            "block", f"fixed({k})", "spec-verification",
        )
        for k in (5, 8)
    },
    "w/o adaptive drafting (k = 5)": ("block", "fixed(5)", FULL),
    "w/o adaptive verification (fixed τ)": ("block", TWO, "spec-verification"),
    **{
        f"{name} only": ("block", f"cm-asd(two_pass=true,{part})", f"cm-asd({part})")
        for name, part in ONE.items()
    },
    "CM-ASD, prose": ("block", TWO, FULL),
    "CM-ASD, formula": ("block", TWO, "cm-asd(mode=formula)"),
    "auto, standard": ("block", "auto", "standard"),
    "auto, CM-ASD's rule": ("block", "auto", FULL),
    "shared: k = 3, exact": ("shared", "fixed(3)", "standard"),
    "shared: CM-ASD, incremental": ("shared", FULL, FULL),
    "shared: auto, standard": ("shared", "auto", "standard"),
    "shared: auto, CM-ASD's rule": ("shared", "auto", FULL),
    "lookup: auto, standard": ("lookup", "auto", "standard"),
}  # fmt: skip
"""Drafter, controller and rule; None: transformers' own. SpecDec's drafter is `block`, CM-ASD's,
too; that its length is decided before drafting costs nothing there."""
SETS = {
    "sentences": "Tatoeba test, single sentences",
    "texts": "Tatoeba test, two to six sentences in a row",
    "multi30k": "Multi30k test_2016, captions, which the model was not trained on",
}
CAP = 96


@dataclass(frozen=True)
class Item:
    """A source and its reference translations."""

    source: str
    references: tuple[str, ...]


def read_set(data: Path, name: str) -> list[Item]:
    """The sources of a test set, in an order drawn once."""
    if name == "multi30k":
        sides = []
        for language in ("en", "de"):
            path = data / "multi30k" / f"test_2016_flickr.{language}.gz"
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                sides.append([line.strip() for line in lines])
        items = [Item(e, (g,)) for e, g in zip(*sides, strict=True)]
    else:
        pairs = read_pairs(data / "tatoeba" / "test.tsv.gz")
        items = [Item(english, german) for english, german in pairs]
    rng = random.Random(7)
    rng.shuffle(items)
    if name != "texts":
        return items
    joined = []
    while items:
        some = [items.pop() for _ in range(min(rng.randint(2, 6), len(items)))]
        joined.append(
            Item(" ".join(i.source for i in some), (" ".join(i.references[0] for i in some),))
        )
    return joined


class Translator:
    """The shipped translator with every drafter, and transformers on the same weights."""

    def __init__(self) -> None:
        self.models = {
            kind: forerun.load("translator", draft=kind, device="cpu", dtype="float32")
            for kind in ("none", "shared", "block", "lookup")
        }
        self.model = self.models["none"]
        self.peers: dict[str, Peer] = {
            BEAM: TransformersBeam(self.model, 5),
            "transformers, greedy": TransformersPlain(self.model),
            "transformers, assisted": TransformersAssisted(self.models["shared"], "constant", 3),
        }

    def run(self, batch: Sequence[Item], name: str) -> Run:
        """Translate with one method."""
        texts = [item.source for item in batch]
        if name in self.peers:
            made = self.peers[name].generate([self.model.encode(t) for t in texts], CAP)
            out = [self._text(tokens) for tokens in made.tokens]
            return Run(out, made.seconds, sum(map(len, made.tokens)))
        how = METHODS[name]
        assert how is not None
        drafter, controller, rule = how
        began = time.perf_counter()
        done = self.models[drafter].generate(
            texts,
            controller=controller,
            rule=rule,
            plain=drafter == "none",
            batch_size=len(texts),
            max_new_tokens=CAP,
        )
        seconds = time.perf_counter() - began
        stats = [d.stats for d in done]
        # Draft time is the batch's: every row of a round reports the same.
        longest = max(stats, key=lambda s: s.rounds)
        return Run(
            [d.text for d in done],
            seconds,
            sum(s.tokens for s in stats),
            sum(s.rounds for s in stats),
            sum(s.accepted for s in stats),
            sum(r.accepted < r.drafted for d in done for r in d.rounds),
            longest.draft_seconds / max(longest.rounds, 1),
            sum((s.drift_mean or 0) * s.tokens for s in stats),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer: Any = self.model.tokenizer
        return str(tokenizer.decode([t for t in tokens if t not in self.model.eos]))


def bleu(items: Sequence[Item], texts: Sequence[str]) -> float:
    """SacreBLEU against all references."""
    most = max(len(item.references) for item in items)
    references = [[(*item.references, *[None] * most)[i] for item in items] for i in range(most)]
    return float(sacrebleu.corpus_bleu(list(texts), references).score)


@cache
def loaded() -> Translator:
    """The models, once."""
    return Translator()


def _kept(name: str, add: bool) -> dict[str, Any]:
    """What is in the results by now."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["results"]) if add and path.exists() else {}


def speed(
    data: Path,
    sets: Sequence[str],
    batches: Sequence[int],
    count: int,
    seeds: Sequence[int],
    add: bool,
) -> None:
    """Time every method, paired by batch; write `translator.json`, `add` to what is there."""
    engine = loaded()
    results = _kept("translator", add)
    for name in sets:
        items = read_set(data, name)
        for size in batches:
            each = max(size, count)
            names = [n for n in METHODS if size == 1 or n != "transformers, assisted"]
            for method in names:
                engine.run(items[:1], method)
            for seed in seeds:
                work = [
                    items[first : first + size]
                    for first in range(seed * each, (seed + 1) * each, size)
                ]
                label = f"{name}, batch {size}, seed {seed}"
                runs = interleaved(work, names, engine.run, label)
                cell = results.setdefault(f"{name}/{size}", {"each": each, "seeds": {}})
                cell["seeds"][str(seed)] = {n: _speed(runs, names, n) for n in names}
    made = provenance(engine.model, cap=CAP)
    made["command"] = "python -m benchmarks.run translator --data DATA"
    save("translator", made, results, _speed_text(results))


def _speed(runs: Sequence[Sequence[Run]], names: Sequence[str], name: str) -> dict[str, float]:
    """Of one seed; speed-ups are geometric means over batches."""
    ours = [row[names.index(name)] for row in runs]
    pace = np.array([run.tokens / run.seconds for run in ours])
    rounds = max(sum(run.rounds for run in ours), 1)
    out = {
        "ms": 1e3 * sum(run.seconds for run in ours) / sum(run.tokens for run in ours),
        "accepted": sum(run.accepted for run in ours) / rounds,
        "rollback": sum(run.rejected for run in ours) / rounds,
        "draft_ms": 1e3 * float(np.mean([run.draft_seconds for run in ours])),
    }
    for column, base in (("plain", PLAIN), ("beam", BEAM)):
        other = [row[names.index(base)].tokens / row[names.index(base)].seconds for row in runs]
        out[column] = float(np.exp(np.mean(np.log(pace / other))))
    return out


def _speed_text(results: dict[str, Any]) -> str:
    def cell(values: Sequence[float]) -> str:
        spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        return f"{np.mean(values):.2f}{spread}"

    parts = []
    for key in sorted(results, key=_order):
        name, size = key.split("/")
        seeds = list(results[key]["seeds"].values())
        rows = [
            [
                method,
                *[
                    cell([s[method][k] for s in seeds]) if drafts(method) else "–"
                    for k in ("accepted", "draft_ms", "rollback")
                ],
                *[cell([s[method][k] for s in seeds]) for k in ("plain", "beam", "ms")],
            ]
            for method in seeds[0]
        ]
        header = ["method", "accepted a round", "draft ms a round", "rollback rate",
                  "speed over plain greedy", "over beam 5", "ms a token"]  # fmt: skip
        parts.append(
            f"## {SETS[name]}; batch {size}\n\n"
            f"{len(seeds)} seeds, {results[key]['each']} sources each.\n\n" + table(header, rows)
        )
    return (
        "Greedy; every seed has its own sources; mean ± standard deviation over seeds. "
        "Speeds are of tokens per second, encoding included, paired by batch, geometric means. "
        "Rollback rate: rounds in which a drafted token was rejected. Methods without another "
        "drafter's name draft with `block`; blockwise, `standard` and `auto, standard` write plain "
        "decoding's text, the others' quality is in `translator-quality`. transformers' assisted "
        "generation has the draft of `shared`, three tokens, and runs at batch 1 only.\n\n"
        + "\n\n".join(parts)
    )


def drafts(method: str) -> bool:
    """Whether one of ours that drafts."""
    how = METHODS[method]
    return how is not None and how[0] != "none"


def _order(key: str) -> tuple[int, int]:
    name, size = key.split("/")
    return int(size), list(SETS).index(name)


def quality(data: Path, sets: Sequence[str], count: int, add: bool) -> None:
    """SacreBLEU of every method; write `translator-quality.json`, `add` to what is there."""
    engine = loaded()
    results: dict[str, Any] = {}
    names = [n for n in METHODS if n not in ("transformers, greedy", "transformers, assisted")]
    names = [PLAIN, *[n for n in names if n != PLAIN]]
    progress, task = bar("quality", len(names) * len(sets))
    with progress:
        for which in sets:
            items = read_set(data, which)[:count]
            cells: dict[str, Any] = {}
            greedy: list[str] = []
            for name in names:
                done = [engine.run(items[i : i + 50], name) for i in range(0, len(items), 50)]
                texts = [text for run in done for text in run.texts]
                greedy = greedy or texts
                tokens = sum(run.tokens for run in done)
                rounds = max(sum(run.rounds for run in done), 1)
                cells[name] = {
                    "bleu": bleu(items, texts),
                    "relative": relative(texts, greedy),
                    "same": float(np.mean([a == b for a, b in zip(texts, greedy, strict=True)])),
                    "drift": sum(run.drift for run in done) / tokens,
                    "accepted": sum(run.accepted for run in done) / rounds,
                    "rollback": sum(run.rejected for run in done) / rounds,
                }
                progress.advance(task)
            results[which] = {"count": len(items), "methods": cells}
    made = provenance(engine.model, cap=CAP)
    made["command"] = "python -m benchmarks.run translator-quality --data DATA"
    results = _kept("translator-quality", add) | results
    save("translator-quality", made, results, _quality_text(results))


def _quality_text(results: dict[str, Any]) -> str:
    parts = []
    for which in (s for s in SETS if s in results):
        rows = []
        for name, m in results[which]["methods"].items():
            rows.append(
                [
                    name, f"{m['bleu']:.2f}", f"{m['relative']:.1f}", f"{100 * m['same']:.0f}",
                    f"{m['drift']:.3f}" if drafts(name) else "–",
                    f"{m['accepted']:.2f}" if drafts(name) else "–",
                    f"{m['rollback']:.2f}" if drafts(name) else "–",
                ]
            )  # fmt: skip
        header = ["method", "SacreBLEU", "relative BLEU", "same texts, %", "drift",
                  "accepted a round", "rollback rate"]  # fmt: skip
        parts.append(
            f"## {SETS[which]}; {results[which]['count']} sources\n\n" + table(header, rows)
        )
    return (
        "Greedy. Single sentences have all known translations as references, the others one. "
        "Relative BLEU is against plain greedy decoding's output; drift is the share of tokens "
        "that are not the target's arg-max after the text before them. Lossless methods differ "
        "from plain greedy by near-ties only.\n\n" + "\n\n".join(parts)
    )
