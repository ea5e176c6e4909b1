"""EASD beside what its paper compares with: accuracy, tokens per answer, words both waver at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import forerun
from benchmarks import rsd
from benchmarks.common import provenance, resumed, save, table
from benchmarks.peers import hugging_face as hf
from benchmarks.quality import CELLS, Outcome, Problem, bar, paired, percent, problems, solve
from forerun import zoo
from forerun.rules.easd import EASD
from forerun.runtime.load import load_model
from forerun.signals import entropy
from recipes.scoring import final_number, verdicts
from recipes.tasks import FAMILIES

LENGTH, MANY = "fixed(5)", 16
DIRECT = {"temperature": 0.7, "top_p": 0.8, "plain": True, "seed": 0}
"""The paper's direct generation, and each of its samples."""
Method = Callable[[str, list[Problem]], dict[str, Any]]


def main(model: forerun.Model, count: int, calibrated: float) -> None:
    """Measure and write `easd-baselines.json`, after every method and cell; it can be continued."""
    draft = forerun.load(zoo.DRAFT, draft="none")
    methods = _methods(model, draft, calibrated)
    how = {"problems": count, "calibrated": calibrated, "length": LENGTH}
    results = resumed("easd-baselines", **how)
    progress, task = bar("baselines", len(CELLS) * len(methods))
    with progress:
        for cell in CELLS:
            items, by_method = problems(cell, count), results.setdefault(cell, {})
            for name, method in methods.items():
                if name not in by_method:
                    by_method[name] = method(cell, items)
                    text = _text(results, list(methods), count, calibrated)
                    save("easd-baselines", provenance(model, **how), results, text)
                progress.advance(task)


def _methods(model: forerun.Model, draft: forerun.Model, calibrated: float) -> dict[str, Method]:
    def by(who: forerun.Model, **settings: Any) -> Method:
        return lambda cell, items: _cell(cell, items, solve(who, cell, items, **settings))

    def wavering(**settings: Any) -> Method:
        def run(cell: str, items: list[Problem]) -> dict[str, Any]:
            done = solve(model, cell, items, **settings)
            words = _words(model, items, done.texts, calibrated)
            return {**_cell(cell, items, done), "words": words}

        return run

    def guided(cell: str, items: list[Problem]) -> dict[str, Any]:
        if not cell.startswith("arithmetic"):
            return {}  # its reward knows arithmetic only
        prompts = [model.encode(p.prompt) for p in items]
        made = rsd.answers(model, draft, rsd.Scorer.load(), prompts)
        done = _outcome(cell, items, [a.text for a in made], sum(a.tokens for a in made))
        kept, steps = sum(a.kept for a in made), sum(a.steps for a in made)
        return {**_cell(cell, items, done), "kept": kept / steps}

    return {
        "target alone": wavering(plain=True),
        "draft alone": by(draft, plain=True),
        "target, T = 0.7, top-p 0.8": by(model, **DIRECT),
        "draft, T = 0.7, top-p 0.8": by(draft, **DIRECT),
        f"draft, majority of {MANY}": lambda cell, items: _majority(draft, cell, items),
        f"draft, {MANY} beams": lambda cell, items: _beams(draft, cell, items),
        f"target, {MANY} beams": lambda cell, items: _beams(model, cell, items),
        "SD": by(model, controller=LENGTH),
        "RSD": guided,
        "EASD (τ_H = 2)": by(model, controller=LENGTH, rule=EASD()),
        f"EASD (τ_H = {calibrated:.2f})": wavering(controller=LENGTH, rule=EASD(calibrated)),
    }


def _outcome(cell: str, items: list[Problem], texts: list[str], tokens: int) -> Outcome:
    """Of a method that has no rounds."""
    right = verdicts(cell.partition(" ")[0], items, texts)
    return Outcome(right, texts, tokens, tokens, 0, 0.0, 0.0)


def _cell(cell: str, items: list[Problem], done: Outcome, tokens: float = 0) -> dict[str, Any]:
    """Accuracy, tokens per answer, and which answers are right, for paired comparisons."""
    out = {k: v for k, v in done.to_json().items() if k in ("accuracy", "low", "high", "n")}
    per_answer = (tokens or done.tokens) / len(items)
    return {**out, "tokens": per_answer, "right": "".join("01"[ok] for ok in done.right)}


def _majority(draft: forerun.Model, cell: str, items: list[Problem]) -> dict[str, Any]:
    """The draft's most frequent answer of its samples; tokens are those of all of them."""
    family = cell.partition(" ")[0]
    runs = [
        solve(draft, cell, items, batch=128, **{**DIRECT, "seed": 1000 * vote})
        for vote in range(MANY)
    ]
    texts = []
    for options in zip(*(run.texts for run in runs), strict=True):
        answers = [final_number(t) if family == "arithmetic" else t.strip() for t in options]
        best = Counter(answers).most_common(1)[0][0]
        texts.append(options[answers.index(best)])
    return _cell(cell, items, _outcome(cell, items, texts, sum(run.tokens for run in runs)))


def _beams(model: forerun.Model, cell: str, items: list[Problem]) -> dict[str, Any]:
    """Beam search of transformers; tokens are those of the best beam."""
    peer = hf.beside(hf.Beam, model, MANY)
    order = sorted(range(len(items)), key=lambda i: len(items[i].prompt))
    texts, tokens = [""] * len(items), 0
    for first in range(0, len(order), 8):
        batch = order[first : first + 8]
        prompts = [model.encode(items[i].prompt) for i in batch]
        made = peer.generate(prompts, FAMILIES[cell.partition(" ")[0]].MAX_NEW_TOKENS)
        for i, row in zip(batch, made, strict=True):
            tokens += len(row)
            texts[i] = model.tokenizer.decode([t for t in row if t not in model.eos])
    return _cell(cell, items, _outcome(cell, items, texts, tokens))


@torch.inference_mode()
def _words(
    model: forerun.Model, items: Sequence[Problem], texts: Sequence[str], threshold: float
) -> dict[str, int]:
    """Tokens written where the target's entropy exceeds a threshold, and how often each."""
    target, counts = load_model(str(zoo.TARGET), "cpu", "float32"), Counter[str]()
    for problem, text in zip(items, texts, strict=True):
        begin, ids = len(model.encode(problem.prompt)), model.encode(problem.prompt + text)
        if len(ids) > begin:
            logits = target(torch.tensor([ids]), use_cache=False).logits[0, begin - 1 : -1]
            high = (entropy(logits.log_softmax(-1)) > threshold).tolist()
            counts.update(
                model.tokenizer.decode([t]) for t, h in zip(ids[begin:], high, strict=True) if h
            )
    return dict(counts.most_common())


def _text(results: dict[str, Any], names: list[str], count: int, calibrated: float) -> str:
    cells = {cell: done for cell in CELLS if (done := results.get(cell))}

    def column(name: str, show: Callable[[dict[str, Any]], str]) -> list[str]:
        return [
            show(by_method[name]) if by_method.get(name) else "–" for by_method in cells.values()
        ]

    gains = {
        cell: {
            name: paired(_right(r), _right(by_method["target alone"]))
            for name, r in by_method.items()
            if r and "target alone" in by_method
        }
        for cell, by_method in cells.items()
    }
    rows = [
        [
            name,
            *column(name, percent),
            *[percent(gains[c][name]) if name in gains[c] else "–" for c in cells],
            *column(name, lambda r: f"{r['tokens']:.1f}"),
        ]
        for name in names
    ]
    header = ["method", *cells, *[f"gain, {c}" for c in cells], *[f"tokens, {c}" for c in cells]]
    kept = [f"{c} {100 * f['RSD']['kept']:.0f} %" for c, f in cells.items() if f.get("RSD")]
    return (
        f"{count} new problems per cell; greedy where no temperature is named, γ = 5, τ_H = "
        f"{calibrated:.2f} calibrated. Accuracy in percent with a 95 % Wilson interval; gain over "
        "the target alone on the same problems, points with a 95 % paired bootstrap interval; "
        "tokens an answer (the paper's Table 3), with majority those of all samples. Beams: by "
        "transformers, without sampling. RSD: its reward is `rsd-scorer`, threshold "
        f"{rsd.THRESHOLD}; it knows arithmetic only; steps of the draft's kept: "
        f"{', '.join(kept) or '–'}.\n\n" + table(header, rows) + _table4(cells, names[-1])
    )


def _right(cell: dict[str, Any]) -> list[bool]:
    return [mark == "1" for mark in cell["right"]]


def _table4(cells: dict[str, Any], ours: str) -> str:
    """Shares of the tokens written at high entropy, before and after."""
    counts = [Counter[str](), Counter[str]()]
    for by_method in cells.values():
        if ours in by_method:
            for count, name in zip(counts, ("target alone", ours), strict=True):
                count.update(by_method[name]["words"])
    before, after = counts
    if not (before and after):
        return ""
    words = sorted({*before, *after}, key=lambda w: -(before[w] + after[w]))[:12]
    rows = [
        [
            f"`{word}`",
            f"{100 * before[word] / before.total():.1f}",
            f"{100 * after[word] / after.total():.1f}",
        ]
        for word in words
    ]
    return (
        "\n\nTokens written where the target's entropy exceeds τ_H, in percent of all such tokens "
        f"({before.total()} of the target's, {after.total()} of EASD's; the paper's Table 4):\n\n"
        + table(["token", "target alone", ours], rows)
    )
