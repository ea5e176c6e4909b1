"""CM-ASD: its ablation (Table III) in kind, and which of its two readings is better."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sacrebleu
import torch

import forerun
from benchmarks.common import PENALTY, interleaved, provenance, recorded, save, table, tasks
from benchmarks.overhead import WIDTHS, forward_costs
from benchmarks.quality import bar
from forerun import zoo
from forerun.costs import Costs
from forerun.lab.traces.replay import replay
from forerun.zoo import ShippedPrompt
from recipes.scoring import score

FULL = "cm-asd"
ONE = {
    "entropy": "entropy=1,margin=0,softmax=0",
    "margin": "entropy=0,margin=1,softmax=0",
    "softmax": "entropy=0,margin=0,softmax=1",
}
FIXED = (5, 8, 10, 25)
"""Constant lengths: ours, the best one in hindsight on these families, and the paper's two."""
METHODS: dict[str, tuple[str, str] | None] = {
    "plain greedy": None,
    "beam 5": None,
    **{f"blockwise (k = {k}, exact)": (f"fixed({k})", "standard") for k in FIXED},
    "adaptive k, exact": (FULL, "standard"),
    **{f"w/o confidence (k = {k}, fixed τ)": (f"fixed({k})", "spec-verification") for k in FIXED},
    "w/o adaptive drafting (fixed k)": ("fixed(5)", FULL),
    "w/o adaptive verification (fixed τ)": (FULL, "spec-verification"),
    **{f"{name} only": (f"cm-asd({part})", f"cm-asd({part})") for name, part in ONE.items()},
    "CM-ASD, prose": (FULL, FULL),
    "CM-ASD, formula": (FULL, "cm-asd(mode=formula)"),
    "CM-ASD, prose, two-pass": ("cm-asd(two_pass=true)", FULL),
}
SEEDS = 3


@dataclass(frozen=True)
class Batch:
    """Prompts of one family that are decoded together."""

    family: str
    seed: int
    prompts: list[ShippedPrompt]


@dataclass(frozen=True)
class Run:
    """One method on one batch."""

    texts: list[str]
    seconds: float
    tokens: int
    rounds: int = 0
    accepted: int = 0
    rejected: int = 0
    draft_seconds: float = 0.0
    drift: float = 0.0

    @classmethod
    def of(cls, done: Sequence[forerun.Completion], seconds: float) -> Run:
        """A batch that took so long."""
        stats = [d.stats for d in done]
        # Draft time is the batch's: every row of a round reports the same.
        longest = max(stats, key=lambda s: s.rounds)
        return cls(
            [d.text for d in done],
            seconds,
            sum(s.tokens for s in stats),
            sum(s.rounds for s in stats),
            sum(s.accepted for s in stats),
            sum(r.accepted < r.drafted for d in done for r in d.rounds),
            longest.draft_seconds / max(longest.rounds, 1),
            sum((s.drift_mean or 0) * s.tokens for s in stats),
        )


def execute(model: forerun.Model, batch: Batch, name: str, cap: int) -> Run:
    """Generate with one method."""
    penalty = PENALTY.get(batch.family, 1.0)
    limit = min(cap, batch.prompts[0].max_new_tokens)
    texts = [p.prompt for p in batch.prompts]
    began = time.perf_counter()
    if name == "beam 5":
        return _beam(model, texts, limit, penalty)
    how = METHODS[name]
    settings = {"plain": True} if how is None else {"controller": how[0], "rule": how[1]}
    done = model.generate(
        texts,
        batch_size=len(texts),
        max_new_tokens=limit,
        repetition_penalty=penalty,
        **settings,
    )
    return Run.of(done, time.perf_counter() - began)


def _beam(model: forerun.Model, texts: Sequence[str], limit: int, penalty: float) -> Run:
    tokenizer: Any = model.tokenizer
    hf: Any = model.target.executor.module()
    ids = [tokenizer.encode(t) for t in texts]
    width = max(map(len, ids))
    eos = min(model.eos)
    rows = torch.tensor([[eos] * (width - len(r)) + r for r in ids], device=model.target.device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in ids], device=rows.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = hf.generate(
            rows,
            attention_mask=mask,
            num_beams=5,
            do_sample=False,
            max_new_tokens=limit,
            repetition_penalty=penalty,
            pad_token_id=eos,
        )
    seconds = time.perf_counter() - began
    new = out[:, width:].tolist()
    kept = [[t for t in row if t != eos] for row in new]
    counts = sum(min(len(k) + 1, limit) for k in kept)
    return Run([tokenizer.decode(k) for k in kept], seconds, counts)


def quality(family: str, prompts: Sequence[ShippedPrompt], texts: Sequence[str]) -> float | None:
    """BLEU or the share of right answers in percent; None for stories."""
    if family == "stories":
        return None
    metrics = score(family, prompts, texts)
    return (
        metrics["bleu"]
        if "bleu" in metrics
        else 100 * metrics.get("accuracy", metrics.get("exact_match", 0))
    )


def relative(texts: Sequence[str], greedy: Sequence[str]) -> float:
    """BLEU against the greedy target's own output."""
    return float(sacrebleu.corpus_bleu(list(texts), [list(greedy)]).score)


def tuned(model: forerun.Model, prompts: int, cap: int) -> int:
    """The constant length that is fastest on validation prompts, by replay at measured costs."""
    costs = forward_costs(model)
    verify = tuple((w, costs["target"][str(w)] / 1e3) for w in WIDTHS)
    trace = recorded(model, tasks(model, "val", prompts, cap))
    speeds = {
        k: replay(trace, f"fixed({k})", Costs(costs["draft"] / 1e3, verify)).speedup
        for k in range(1, 25)
    }
    return max(speeds, key=lambda k: float(np.log(speeds[k]).mean()))


def main(model: forerun.Model, least: int, cap: int, batches: Sequence[int]) -> None:
    """Measure speed at batches of these sizes, each on the fewest batches that hold `least` prompts
    of a seed and family; write `cm-asd.json`."""
    results: dict[str, Any] = {}
    best = tuned(model, max(least, 5), cap)
    METHODS[f"blockwise (k = {best}, tuned)"] = (f"fixed({best})", "standard")
    METHODS[f"w/o confidence (k = {best}, tuned, fixed τ)"] = (
        f"fixed({best})", "spec-verification",
    )  # fmt: skip
    prompts = {size: size * -(-least // size) for size in batches}
    most = max(prompts.values())
    for size, count in prompts.items():
        work = [
            Batch(family, seed, part[i : i + size])
            for seed in range(SEEDS)
            for family in zoo.families()
            for part in [zoo.prompts(family, "test")[seed * most : seed * most + count]]
            for i in range(0, len(part), size)
        ]
        names = list(METHODS)
        for name in names:
            execute(model, work[0], name, 16)
        runs = interleaved(
            work, names, lambda batch, name: execute(model, batch, name, cap), f"batch {size}"
        )
        results[str(size)] = {name: _speed(work, runs, names.index(name)) for name in names}
    made = provenance(model, prompts=prompts, cap=cap, tuned=best)
    save("cm-asd", made, results, _text(results, prompts, cap))


def scores(model: forerun.Model, cap: int, whole: int) -> None:
    """Score every variant on many test prompts; write `cm-asd-quality.json`."""
    results = _quality(model, cap, whole)
    made = provenance(model, cap=cap, whole=whole)
    save("cm-asd-quality", made, results, _quality_text(results, whole))


def _quality(model: forerun.Model, cap: int, whole: int) -> dict[str, Any]:
    """Scores on many test prompts, decoded in large batches; greedy, so once is enough."""
    beams = forerun.load(dtype=model.target.facts.precision, runtime="torch")  # for `generate`
    out: dict[str, Any] = {}
    progress, task = bar("quality", len(METHODS) * len(zoo.families()))
    greedy: dict[str, list[str]] = {}
    with progress:
        for name in METHODS:
            cell: dict[str, Any] = {"score": {}, "relative": {}, "drift": {}}
            for family in zoo.families():
                items = zoo.prompts(family, "test", whole)
                parts = [items[i : i + 50] for i in range(0, len(items), 50)]
                runs = beams if name == "beam 5" else model
                done = [execute(runs, Batch(family, 0, part), name, cap) for part in parts]
                texts = [t for d in done for t in d.texts]
                greedy.setdefault(family, texts)
                cell["score"][family] = quality(family, items, texts)
                cell["relative"][family] = relative(texts, greedy[family])
                cell["drift"][family] = sum(d.drift for d in done) / sum(d.tokens for d in done)
                progress.advance(task)
            out[name] = cell
    return out


def _speed(work: Sequence[Batch], runs: Sequence[Sequence[Run]], index: int) -> dict[str, Any]:
    """Per seed: speed-ups as geometric means over batches; then mean and spread over seeds."""
    names = list(METHODS)
    columns: dict[str, list[float]] = {
        k: [] for k in ("plain", "beam", "ms", "accepted", "draft_ms", "rollback", "drift")
    }
    for seed in range(SEEDS):
        rows = [r for b, r in zip(work, runs, strict=True) if b.seed == seed]
        ours = [r[index] for r in rows]
        pace = [r[index].tokens / r[index].seconds for r in rows]
        for column, base in (("plain", "plain greedy"), ("beam", "beam 5")):
            other = [r[names.index(base)].tokens / r[names.index(base)].seconds for r in rows]
            columns[column].append(float(np.exp(np.mean(np.log(np.array(pace) / other)))))
        columns["ms"].append(1e3 * sum(r.seconds for r in ours) / sum(r.tokens for r in ours))
        rounds = max(sum(r.rounds for r in ours), 1)
        columns["accepted"].append(sum(r.accepted for r in ours) / rounds)
        columns["rollback"].append(sum(r.rejected for r in ours) / rounds)
        columns["draft_ms"].append(1e3 * float(np.mean([r.draft_seconds for r in ours])))
        columns["drift"].append(sum(r.drift for r in ours) / sum(r.tokens for r in ours))
    return {
        key: {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}
        for key, values in columns.items()
    }


def _text(results: dict[str, Any], prompts: dict[int, int], cap: int) -> str:
    def cell(value: dict[str, float], digits: int = 2) -> str:
        return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"

    parts = []
    for size, methods in results.items():
        rows = [
            [
                name,
                *[
                    cell(m[k]) if METHODS[name] else "–"
                    for k in ("accepted", "draft_ms", "rollback")
                ],
                cell(m["plain"]),
                cell(m["beam"]),
                cell(m["ms"]),
                cell(m["drift"], 3),
            ]
            for name, m in methods.items()
        ]
        header = ["variant", "accepted a round", "draft ms a round", "rollback rate",
                  "speed-up over plain", "over beam 5", "ms a token", "drift"]  # fmt: skip
        parts.append(f"Batch {size}, {prompts[int(size)]} prompts each:\n\n{table(header, rows)}")
    return (
        f"Greedy, {cap} tokens at most; {SEEDS} seeds, each with its own test prompts of every "
        "family; mean ± standard deviation over seeds. Speed-ups are of tokens per second, paired "
        "per prompt or batch, geometric means. Rollback rate: rounds in which a drafted token was "
        "rejected. Drift: share of tokens that are not the target's arg-max after the text before "
        "them. Quality: `cm-asd-quality`.\n\n" + "\n\n".join(parts)
    )


def _quality_text(results: dict[str, Any], whole: int) -> str:
    families = list(zoo.families())
    scored = [f for f in families if f != "stories"]
    rows = [
        [
            name,
            *[f"{q['score'][f]:.1f}" for f in scored],
            *[f"{q['relative'][f]:.1f}" for f in ("translation", "stories")],
            f"{np.mean([q['drift'][f] for f in families]):.3f}",
        ]
        for name, q in results.items()
    ]
    units = [f"{f}, {'BLEU' if f == 'translation' else '% right'}" for f in scored]
    header = ["variant", *units, "relative BLEU, translation", "relative BLEU, stories", "drift"]
    return (
        f"Greedy, {whole} test prompts of every family. Relative BLEU is against the greedy "
        "target's own output; drift is the mean over families of the share of tokens that are not "
        "the target's arg-max. The standard error of a share of right answers is about "
        f"{100 * np.sqrt(0.25 / whole):.0f} points.\n\n" + table(header, rows)
    )


def modes(model: forerun.Model, prompts: int, cap: int) -> None:
    """Compare both readings at equal drift on validation prompts; write `cm-asd-modes.json`."""
    rules = {
        "prose": [
            f"cm-asd(tau={t},gamma={g})" for t in (0.0, 0.1) for g in (0.1, 0.2, 0.4, 0.8, 1.6)
        ],
        "formula": [
            f"cm-asd(mode=formula,tau={t},gamma={g})"
            for t in (0.0, 0.1)
            for g in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
        ],
        "constant": [f"spec-verification(tau={t})" for t in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)],
        "constant, top 2": [f"spec-verification(top=2,tau={t})" for t in (0.2, 0.8, 1.6)],
    }
    progress, task = bar("modes", sum(map(len, rules.values())) * len(zoo.families()))
    results: list[dict[str, Any]] = []
    with progress:
        for mode, specs in rules.items():
            for spec in specs:
                tokens = rounds = accepted = 0
                drift, scores = 0.0, {}
                for family in zoo.families():
                    items = zoo.prompts(family, "val", prompts)
                    METHODS["under test"] = ("fixed(5)", spec)
                    done = [
                        execute(model, Batch(family, 0, items[i : i + 50]), "under test", cap)
                        for i in range(0, len(items), 50)
                    ]
                    tokens += sum(d.tokens for d in done)
                    rounds += sum(d.rounds for d in done)
                    accepted += sum(d.accepted for d in done)
                    drift += sum(d.drift for d in done)
                    scores[family] = quality(family, items, [t for d in done for t in d.texts])
                    progress.advance(task)
                mean = float(np.mean([s for s in scores.values() if s is not None]))
                results.append(
                    {
                        "mode": mode,
                        "rule": spec,
                        "accepted_per_round": accepted / rounds,
                        "tokens_per_round": tokens / rounds,
                        "drift": drift / tokens,
                        "quality": mean,
                        "score": scores,
                    }
                )
    METHODS.pop("under test")
    families = [f for f in zoo.families() if f != "stories"]
    rows = [
        [
            r["mode"],
            f"`{r['rule']}`",
            f"{r['tokens_per_round']:.3f}",
            f"{r['drift']:.4f}",
            f"{r['quality']:.2f}",
            *[f"{r['score'][f]:.1f}" for f in families],
        ]
        for r in sorted(results, key=lambda r: (r["mode"], r["drift"]))
    ]
    header = ["reading", "rule", "tokens a round", "drift", "mean quality", *families]
    text = (
        f"Both readings of CM-ASD's margin and a constant one on {prompts} validation prompts of "
        "every family, greedy, γ = 5. The better reading gets more tokens a round at the same "
        "drift and quality.\n\n" + table(header, rows)
    )
    save("cm-asd-modes", provenance(model, prompts=prompts, cap=cap), results, text)
