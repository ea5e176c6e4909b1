"""Readings of the papers on the same positions: what is kept, what it costs, what predicts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import forerun
from benchmarks.common import provenance, save, table, tasks
from forerun.confidence import Confidence
from forerun.rules import RULES
from forerun.rules.easd import EASD
from forerun.rules.odds import Odds
from forerun.signals import measure
from forerun.types import LIVE_SIGNALS, SIGNALS, Draft, Target

RULE_READINGS = (
    "standard", "ears", "ears(correction=target)", "ears(excluded=true)",
    "ears(beta=0.3)", "ears(beta=0.3,correction=target)", "ears(beta=0.3,excluded=true)",
    "easd(entropy=inf)", "easd", "easd(penalty=top)", "easd(processed=true)",
    "easd(correction=residual)", "easd(penalty=top,correction=residual)",
)  # fmt: skip
NONE = {"entropy": 0.0, "margin": 0.0, "softmax": 0.0}
CONFIDENCES = {
    "ensemble": Confidence(),
    "ensemble, as printed": Confidence(literal=True),
    "1 − H / log V": Confidence(**{**NONE, "entropy": 1.0}),
    "σ(z1 − z2)": Confidence(**{**NONE, "margin": 1.0}),
    "(P1 − P2) / P1": Confidence(**{**NONE, "softmax": 1.0}),
    "P1 − P2": Confidence(**{**NONE, "softmax": 1.0}, normalized=False),
    "logit variance": Confidence(**NONE, variance=1.0),
}
WAYS = {"T = 1": (1.0, 0), "T = 0.7": (0.7, 0), "T = 1, top-k 20": (1.0, 20)}
DRAWS = 4
EVERY = frozenset((*SIGNALS, *LIVE_SIGNALS))


@torch.inference_mode()
def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `readings.json`."""
    target, draft, drafted = _positions(model, prompts, tokens)
    results: dict[str, Any] = {"rules": {}, "confidences": {}}
    for way, (temperature, top) in WAYS.items():
        results["rules"][way] = _rules(target, draft, temperature, top)
    signals = measure(draft, drafted, EVERY)
    kept = (drafted == target.argmax(-1)).numpy()
    for name, confidence in CONFIDENCES.items():
        results["confidences"][name] = _auc(confidence.score(**signals).numpy(), kept)
    rows = [
        [
            f"`{spec}`",
            *[
                f"{cells[spec]['kept']:.3f} / {cells[spec]['drift']:.4f}"
                for cells in results["rules"].values()
            ],
            f"{100 * results['rules']['T = 1'][spec]['penalised']:.1f}",
        ]
        for spec in RULE_READINGS
    ]
    text = (
        f"Target and draft on the same {len(target)} positions of texts that the target sampled at "
        "T = 1 for test prompts of all families. Share of drafted tokens kept / mean drift at a "
        "drafted position (exact), and the share of positions where a penalty fires at T = 1:"
        "\n\n"
        + table(["rule", *WAYS, "penalised %"], rows)
        + "\n\nHow well CM-ASD's confidences tell a greedy draft's hits "
        f"({100 * kept.mean():.0f} %) from its misses, area under the ROC curve:\n\n"
        + table(
            ["confidence", "area"], [[n, f"{v:.3f}"] for n, v in results["confidences"].items()]
        )
    )
    made = provenance(model, prompts=prompts, tokens=tokens, positions=len(target))
    save("readings", made, results, text)


def _positions(
    model: forerun.Model, prompts: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw logits of target and draft `(n, V)` at every position of sampled texts, and the draft's
    most likely token."""
    whole: list[list[torch.Tensor]] = [[], []]
    modules = [model.target.executor.module(), model.drafter.rows.executor.module()]  # type: ignore[attr-defined]
    for i, task in enumerate(tasks(model, "test", prompts, tokens)):
        text = model.generate(
            task.tokens, temperature=1.0, seed=i, max_new_tokens=task.max_new_tokens
        ).tokens
        ids = torch.tensor([[*task.tokens, *text]])
        for logits, module in zip(whole, modules, strict=True):
            logits.append(module(ids).logits[0, len(task.tokens) - 1 : -1].float())
    target, draft = (torch.cat(parts) for parts in whole)
    return target, draft, draft.argmax(-1)


def _rules(
    target: torch.Tensor, draft: torch.Tensor, temperature: float, top: int
) -> dict[str, dict[str, float]]:
    """What each reading keeps and costs under one way of sampling."""
    wanted, drawn = (_shaped(logits, temperature, top) for logits in (target, draft))
    coins = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(drawn.softmax(-1), DRAWS, replacement=True, generator=coins)
    out = {}
    for spec in RULE_READINGS:
        rule, measured = RULES.make(spec), []
        for token in tokens.T:
            proposed = Draft(
                token[:, None], torch.ones(len(token)).long(), drawn.softmax(-1)[:, None],
                draft[:, None],
            )  # fmt: skip
            judge = Target(
                wanted[:, None].expand(-1, 2, -1), torch.zeros(len(token)).bool(),
                target[:, None].expand(-1, 2, -1),
            )  # fmt: skip
            verdict = rule.judge(
                proposed, judge, torch.rand(len(token), 2, generator=coins, dtype=torch.float64)
            )
            drift = 0.0 if verdict.drift is None else float(verdict.drift.mean())
            share = 0.0
            if isinstance(rule, EASD):
                share = float(rule.fires(Odds(proposed, judge)).float().mean())
            measured.append((float(verdict.accept_prob.mean()), drift, share))
        kept, drift, share = np.mean(measured, axis=0)
        out[spec] = {"kept": float(kept), "drift": float(drift), "penalised": float(share)}
    return out


def _shaped(logits: torch.Tensor, temperature: float, top: int) -> torch.Tensor:
    """After the sampling transform."""
    if top:
        least = logits.topk(top, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits / temperature


def _auc(score: np.ndarray, kept: np.ndarray) -> float:
    """Chance that a hit scores higher than a miss; ties count half."""
    order = np.argsort(score, kind="stable")
    _, first, counts = np.unique(score[order], return_index=True, return_counts=True)
    rank = np.empty(len(score))
    rank[order] = np.repeat(first + (counts + 1) / 2, counts)
    hits = int(kept.sum())
    return float((rank[kept].sum() - hits * (hits + 1) / 2) / (hits * (len(kept) - hits)))
