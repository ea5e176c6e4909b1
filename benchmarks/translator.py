"""CM-ASD where it was written for: encoder-decoder models that translate and sum up.

Tables I-V in kind.
"""

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
from benchmarks.common import RESULTS, interleaved, provenance, save, show, table
from benchmarks.peers import hugging_face as hf
from benchmarks.quality import bar
from benchmarks.rouge import rouge
from forerun import zoo
from forerun.lab.traces.results import draws
from forerun.runtime.drafts import own_draft
from recipes.corpus import SENTENCE_END, read_pairs
from recipes.tasks import digest

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
    "Spec-Verification, lenient (k = 5, τ = 2)": (
        "block", "fixed(5)", "spec-verification(top=5,tau=2)",
    ),
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
    "lookup: k = 3, exact": ("lookup", "fixed(3)", "standard"),
}  # fmt: skip
"""Drafter, controller and rule; None: transformers' own. SpecDec's drafter is `block`, CM-ASD's,
too; that its length is decided before drafting costs nothing there."""
SETS = {
    "sentences": "Tatoeba test, single sentences",
    "texts": "Tatoeba test, two to six sentences in a row",
    "multi30k": "Multi30k test_2016, captions, which the model was not trained on",
    "digest": "Digest test (synthetic), two to four facts among sentences of a held-out book",
    "digests": "Digest test, passages joined, longer than the model was trained on",
}
OF = {"translator": ("sentences", "texts", "multi30k"), "digest": ("digest", "digests")}
"""Test sets of each model."""
JOINED, LONGEST = 3, 1600
"""Passages of the digest's test set that make one of `digests`, and most characters of these: its
encoder reads 512 tokens."""
CAP = 96


@dataclass(frozen=True)
class Item:
    """A source and its reference translations."""

    source: str
    references: tuple[str, ...]


def read_set(data: Path | None, name: str) -> list[Item]:
    """The sources of a test set, in an order drawn once; those of the digest ship."""
    if name not in SETS:
        raise ValueError(f"no test set {name!r}; there are {', '.join(SETS)}")
    if name in OF["digest"]:
        passages = zoo.sources(family="digest")
        joined = 1 if name == "digest" else JOINED
        parts = [passages[i : i + joined] for i in range(0, len(passages), joined)]
        items = [
            Item(
                " ".join(p.prompt for p in part),
                ("; ".join(p.answer.removesuffix(".") for p in part) + ".",),
            )
            for part in parts
        ]
        return [item for item in items if joined == 1 or len(item.source) <= LONGEST]
    if data is None:
        raise ValueError(f"the test set {name} needs --data")
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
        sentences = [items.pop() for _ in range(min(rng.randint(2, 6), len(items)))]
        joined.append(
            Item(
                " ".join(i.source for i in sentences),
                (" ".join(i.references[0] for i in sentences),),
            )
        )
    return joined


class Translator:
    """A shipped encoder-decoder model with its drafters, and transformers on the same weights."""

    def __init__(self, target: str) -> None:
        folder = zoo.NAMES[target]
        self.models = {
            kind: forerun.load(target, draft=kind, device="cpu", dtype="float32")
            for kind in ("none", "shared", "block", "lookup")
            if kind in ("none", "lookup") or own_draft(folder, kind)
        }
        self.model = self.models["none"]
        self.peers = {
            BEAM: hf.beside(hf.Beam, self.model, 5),
            "transformers, greedy": hf.beside(hf.Plain, self.model),
        }
        if "shared" in self.models:
            assisted = hf.beside(hf.Assisted, self.models["shared"], "constant", 3)
            self.peers["transformers, assisted"] = assisted

    def methods(self, size: int) -> list[str]:
        """Those of `METHODS` whose drafter the model has, at a batch size."""
        names = [
            n for n, how in METHODS.items() if n in self.peers or (how and how[0] in self.models)
        ]
        return [n for n in names if size == 1 or n != "transformers, assisted"]

    def run(self, batch: Sequence[Item], name: str) -> Run:
        """Translate with one method."""
        texts = [item.source for item in batch]
        if name in self.peers:
            prompts = [self.model.encode(t) for t in texts]
            began = time.perf_counter()
            made = self.peers[name].generate(prompts, CAP)
            seconds = time.perf_counter() - began
            return Run([self._text(tokens) for tokens in made], seconds, sum(map(len, made)))
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
        return Run.of(done, time.perf_counter() - began)

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer: Any = self.model.tokenizer
        return str(tokenizer.decode([t for t in tokens if t not in self.model.eos]))


def bleu(items: Sequence[Item], texts: Sequence[str]) -> float:
    """SacreBLEU against all references."""
    most = max(len(item.references) for item in items)
    references = [[(*item.references, *[None] * most)[i] for item in items] for i in range(most)]
    return float(sacrebleu.corpus_bleu(list(texts), references).score)


@cache
def loaded(target: str) -> Translator:
    """The models, once."""
    return Translator(target)


def _kept(name: str, add: bool) -> dict[str, Any]:
    """What is in the results by now."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["results"]) if add and path.exists() else {}


def speed(
    data: Path | None,
    target: str,
    sets: Sequence[str],
    batches: Sequence[int],
    count: int,
    seeds: Sequence[int],
    add: bool,
) -> None:
    """Time every method, paired by batch; write a file of the target's name.

    With `add` what is there stays.
    """
    engine = loaded(target)
    results = _kept(target, add)
    for name in sets:
        items = read_set(data, name)
        for size in batches:
            per_seed = max(size, count)
            names = engine.methods(size)
            for method in names:
                engine.run(items[:1], method)
            engine.run(items[:size], PLAIN)  # the first batch of a size is slower, whoever runs it
            for seed in seeds:
                work = [
                    items[first : first + size]
                    for first in range(seed * per_seed, (seed + 1) * per_seed, size)
                ]
                label = f"{name}, batch {size}, seed {seed}"
                runs = interleaved(work, names, engine.run, label, seed)
                cell = results.setdefault(f"{name}/{size}", {"each": per_seed, "seeds": {}})
                cell["seeds"][str(seed)] = {n: _speed(runs, names, n) for n in names}
    made = provenance(engine.model, cap=CAP)
    made["command"] = _command("translator", target)
    save(target, made, results, _speed_text(results, f"{target}-quality"))


def _command(name: str, target: str) -> str:
    return f"python -m benchmarks.run {name} " + (
        "--data DATA" if target == "translator" else f"--target {target}"
    )


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


def _speed_text(results: dict[str, Any], quality: str) -> str:
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
        f"decoding's text, the others' quality is in `{quality}`. transformers' assisted "
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


def quality(data: Path | None, target: str, sets: Sequence[str], count: int, add: bool) -> None:
    """SacreBLEU or ROUGE of every method; write a file of the target's name and "-quality".

    With `add` what is there stays.
    """
    engine = loaded(target)
    results: dict[str, Any] = {}
    names = [n for n in engine.methods(16) if n != "transformers, greedy"]
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
                cells[name] = _scores(which, items, texts, greedy) | {
                    "relative": relative(texts, greedy),
                    "same": float(np.mean([a == b for a, b in zip(texts, greedy, strict=True)])),
                    "drift": sum(run.drift for run in done) / tokens,
                    "accepted": sum(run.accepted for run in done) / rounds,
                    "rollback": sum(run.rejected for run in done) / rounds,
                }
                progress.advance(task)
            results[which] = {"count": len(items), "methods": cells}
            if which == "digest":
                results[which]["extracts"] = extracts(items)
    made = provenance(engine.model, cap=CAP)
    made["command"] = _command("translator-quality", target)
    results = _kept(f"{target}-quality", add) | results
    save(f"{target}-quality", made, results, _quality_text(results))


def extracts(items: Sequence[Item]) -> dict[str, tuple[float, float, float]]:
    """ROUGE-1, -2 and -L of sentences of the passages as they stand."""
    rng = random.Random(7)
    sentences = [SENTENCE_END.split(item.source) for item in items]
    chosen = {
        "lead-3": [passage[:3] for passage in sentences],
        "random-3": [rng.sample(passage, min(3, len(passage))) for passage in sentences],
        "the right sentences": [digest.facts(item.source) for item in items],
    }
    references = [item.references[0] for item in items]
    return {n: rouge(references, [" ".join(extract) for extract in c]) for n, c in chosen.items()}


def _scores(
    which: str, items: Sequence[Item], texts: Sequence[str], greedy: Sequence[str]
) -> dict[str, Any]:
    if which not in OF["digest"]:
        return {"bleu": bleu(items, texts)}
    right = [item.references[0] for item in items]
    exact = float(np.mean([a == b for a, b in zip(right, texts, strict=True)]))
    ones = [
        [rouge([r], [t])[0] for r, t in zip(right, written, strict=True)]
        for written in (texts, greedy)
    ]
    differ = np.subtract(*ones)
    low, high = np.quantile(differ[draws(len(items), 0)].mean(1), [0.025, 0.975])
    more = {"mean": float(differ.mean()), "low": float(low), "high": float(high)}
    return {"rouge": rouge(right, texts), "more": more, "exact": exact}


def _quality_text(results: dict[str, Any]) -> str:
    parts = []
    for which in (s for s in SETS if s in results):
        summed = which in OF["digest"]
        rows = []
        for name, m in results[which]["methods"].items():
            figures = (
                [_rouge(m["rouge"]), show(m["more"]), f"{100 * m['exact']:.0f}"]
                if summed
                else [f"{m['bleu']:.2f}"]
            )
            rows.append(
                [
                    name, *figures, f"{m['relative']:.1f}", f"{100 * m['same']:.0f}",
                    f"{m['drift']:.3f}" if drafts(name) else "–",
                    f"{m['accepted']:.2f}" if drafts(name) else "–",
                    f"{m['rollback']:.2f}" if drafts(name) else "–",
                ]
            )  # fmt: skip
        for name, three in results[which].get("extracts", {}).items():
            rows.append([f"{name}, verbatim", _rouge(three), *["–"] * 7])
        scores = ["ROUGE-1 / 2 / L", "ROUGE-1 over greedy", "right, %"]
        header = ["method", *(scores if summed else ["SacreBLEU"]), "relative BLEU",
                  "same texts, %", "drift", "accepted a round",
                  "rollback rate"]  # fmt: skip
        parts.append(
            f"## {SETS[which]}; {results[which]['count']} sources\n\n" + table(header, rows)
        )
    return (
        "Greedy. Single sentences have all known translations as references, the others one. "
        "Relative BLEU is against plain greedy decoding's output; drift is the share of tokens "
        "that are not the target's arg-max after the text before them. Lossless methods differ "
        "from plain greedy by near-ties only. ROUGE: mean F1, words not stemmed.\n\n"
        + "\n\n".join(parts)
    )


def _rouge(three: Sequence[float]) -> str:
    return " / ".join(f"{x:.1f}" for x in three)
