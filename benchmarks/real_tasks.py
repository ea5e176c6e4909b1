"""EASD on GSM8K and CM-ASD on captions, with a real model and a draft of another tokenizer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from benchmarks.cmasd import relative
from benchmarks.common import chat, geometric, provenance, resumed, save, show, table
from benchmarks.quality import paired, percent
from benchmarks.translator import Item, bleu, read_set
from forerun.lab import calibrate
from recipes.evaluate import wilson

PLAIN = "target alone"
CAPTIONS = {
    "SpecDec": ("fixed(5)", "spec-verification"),
    "w/o adaptive drafting": ("fixed(5)", "cm-asd"),
    "w/o adaptive verification": ("cm-asd", "spec-verification"),
    "CM-ASD": ("cm-asd", "cm-asd"),
}
SUMS = "{question}\nReason step by step and end with #### and the number."
TRANSLATE = "Translate this caption to German. Answer with the translation alone.\n{source}"


@dataclass(frozen=True)
class Asked:
    """A prompt in the chat template, and what its answer is scored by."""

    prompt: list[int]
    item: Item


def gsm8k(target: str, draft: str, data: Path, count: int, tokens: int, calibrated: int) -> None:
    """EASD on problems of GSM8K: accuracy, drift, speed; write `easd-gsm8k.json`.

    Written after every problem; the same command goes on, also with more of them.

    Args:
        target: a model that follows instructions.
        draft: a smaller one of any tokenizer; it drafts the tokens that both have.
        data: the folder with gsm8k/.
        count: problems of the test set.
        tokens: most of an answer.
        calibrated: training problems that τ_H is taken from.
    """
    made = {"target": Path(target).name, "draft": Path(draft).name, "tokens": tokens}
    made |= {"calibrated": calibrated}
    results = resumed("easd-gsm8k", **made)
    model = _loaded(target, draft)
    if not results:
        results = {"entropy": _threshold(model, data, tokens, calibrated), "runs": []}
    limit = f"easd(entropy={results['entropy']:.4f}"
    methods = {
        "standard": ("fixed(5)", "standard"),
        "EASD, τ_H = 2": ("fixed(5)", "easd"),
        "EASD, calibrated": ("fixed(5)", f"{limit})"),
        "EASD, calibrated, bonus token": ("fixed(5)", f"{limit},bonus=untested)"),
    }
    asked = [
        Asked(chat(model.tokenizer, SUMS.format(**p)), Item(p["question"], (p["answer"],)))
        for p in _problems(data / "gsm8k" / "test.jsonl", count)
    ]
    for _ in _answered(model, asked, methods, tokens, results["runs"], right):
        text = _sums_text(results, calibrated)
        save("easd-gsm8k", provenance(model, **made), results, text)


def captions(target: str, draft: str, data: Path, count: int, tokens: int) -> None:
    """CM-ASD on captions of Multi30k: BLEU, drift, speed; write `cm-asd-captions.json`.

    Arguments as for `gsm8k`; it goes on likewise.
    """
    made = {"target": Path(target).name, "draft": Path(draft).name, "tokens": tokens}
    results = resumed("cm-asd-captions", **made) or {"runs": []}
    model = _loaded(target, draft)
    methods = {"standard": ("fixed(5)", "standard"), **CAPTIONS}
    asked = [
        Asked(chat(model.tokenizer, TRANSLATE.format(source=item.source)), item)
        for item in read_set(data, "multi30k")[:count]
    ]
    for _ in _answered(model, asked, methods, tokens, results["runs"], _whole):
        text = _captions_text(results, asked)
        save("cm-asd-captions", provenance(model, **made), results, text)


def _loaded(target: str, draft: str) -> forerun.Model:
    return forerun.load(target, f"model({draft!r},by='tokens')")


def _problems(file: Path, count: int) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def _threshold(model: forerun.Model, data: Path, tokens: int, count: int) -> float:
    """τ_H of training problems, as the paper takes it: the target's entropies alone make it."""
    problems = _problems(data / "gsm8k" / "train.jsonl", count)
    prompts = [chat(model.tokenizer, SUMS.format(**p)) for p in problems]
    sampling = forerun.Sampling(max_new_tokens=tokens)
    how = {"sampling": sampling, "batch_size": 1, "target_only": True}
    return calibrate.easd(model, prompts, **how)["entropy"]


def _answered(
    model: forerun.Model,
    asked: Sequence[Asked],
    methods: dict[str, tuple[str, str]],
    tokens: int,
    runs: list[dict[str, Any]],
    kept: Callable[[str, Item], Any],
) -> Iterator[None]:
    """Answer one problem after another by every method, from the first that `runs` lacks."""
    how: dict[str, dict[str, Any]] = {PLAIN: {"plain": True}}
    how |= {name: {"controller": c, "rule": r} for name, (c, r) in methods.items()}
    names = list(how)
    for number in range(len(runs), len(asked)):
        row: dict[str, Any] = {}
        at = number % len(names)  # no method always follows the same one
        for name in names[at:] + names[:at]:
            began = time.process_time()
            [done] = model.generate([asked[number].prompt], max_new_tokens=tokens, **how[name])
            stats = done.stats
            row[name] = {
                "kept": kept(done.text, asked[number].item),
                "tokens": stats.tokens,
                "rounds": stats.rounds,
                "drift": (stats.drift_mean or 0) * stats.tokens,
                "seconds": time.process_time() - began,
            }
        runs.append({name: row[name] for name in names})
        yield


def _whole(text: str, item: Item) -> str:
    return text.strip()


def right(text: str, item: Item) -> bool:
    """Whether the last number of a text is that of a worked answer of GSM8K."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    wanted = item.references[0].rpartition("####")[2].replace(",", "")
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(wanted)


def _counts(results: dict[str, Any], name: str) -> list[str]:
    """A method's `COLUMNS`."""
    own = [row[name] for row in results["runs"]]
    tokens, rounds, drift = (sum(run[k] for run in own) for k in ("tokens", "rounds", "drift"))
    pace = [
        [run["tokens"] / run["seconds"] for run in (row[name], row["standard"])]
        for row in results["runs"]
    ]
    return [
        f"{tokens / rounds:.2f}", f"{drift / tokens:.4f}", f"{tokens / len(own):.0f}",
        show(geometric(np.divide(*np.transpose(pace)))),
    ]  # fmt: skip


COLUMNS = ("tokens a round", "drift", "tokens a text", "speed over standard, processor time")


def _sums_text(results: dict[str, Any], calibrated: int) -> str:
    runs = results["runs"]
    scores = {name: [row[name]["kept"] for row in runs] for name in runs[0]}
    rows = []
    for name, own in scores.items():
        low, high = wilson(sum(own), len(own))
        accuracy = percent({"accuracy": float(np.mean(own)), "low": low, "high": high})
        gain = "–" if name == PLAIN else percent(paired(own, scores[PLAIN]))
        rows.append([name, accuracy, gain, *_counts(results, name)])
    header = ["method", "accuracy, %", "over the target, points", *COLUMNS]
    return (
        f"{len(runs)} test problems, greedy, batch 1; τ_H = {results['entropy']:.2f} from "
        f"{calibrated} training problems. Accuracy with a 95 % Wilson interval, differences and "
        "speeds paired, by bootstrap.\n\n" + table(header, rows)
    )


def _captions_text(results: dict[str, Any], asked: Sequence[Asked]) -> str:
    runs = results["runs"]
    items = [a.item for a in asked[: len(runs)]]
    texts = {name: [row[name]["kept"] for row in runs] for name in runs[0]}
    rows = [
        [name, f"{bleu(items, own):.2f}", f"{relative(own, texts[PLAIN]):.1f}",
         *_counts(results, name)]
        for name, own in texts.items()
    ]  # fmt: skip
    header = ["method", "SacreBLEU", "relative BLEU", *COLUMNS]
    return (
        f"{len(runs)} captions into German, greedy, batch 1. Relative BLEU is against the target's "
        "own output; speeds paired, geometric mean with a 95 % interval.\n\n" + table(header, rows)
    )
