"""SpecBound on a real model, by exact replay of its exits: what annealing and a vocabulary buy."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

import forerun
from benchmarks.common import provenance, save, table
from benchmarks.starting_lengths import chats
from forerun.lab.exits.exit_replay import ExitTrace, OwnText, Setting
from forerun.lab.exits.sweep import ExitSearch, candidates, written
from forerun.runtime.drafts import ABOUT
from forerun.runtime.heads import ExitHeads, load_heads
from forerun.runtime.layers import LayerAccess
from recipes.smollm2.prompts import Sources, prompt_of

VOCAB = 4096
"""Tokens of the cut lens: the first of a byte-pair vocabulary, which are its most frequent."""
THRESHOLDS, SHOWN = (0.5, 0.7, 0.8, 0.9, 0.95), (0.0, 0.25, 0.5, 1.0, 2.0)
"""Of the grid: τ and a."""
MADE = "function", "explain", "story", "json", "list", "notice", "restyle", "extract"
"""Kinds of prompts that the heads are trained on the target's answers to, and need no data."""
TRAINING = (
    "--layers", "3,6,9,12,15,18,21,24,27", "--vocab", f"{VOCAB}", "--steps", "64",
    "--tokens", "50000",
)  # fmt: skip
WIDTH, SURE = 6, 0.7
"""Most tokens that climb; the threshold at which annealings are shown beside each other."""


def main(target: str, per_kind: int, tokens: int, exits: Path | None) -> None:
    """Write `specbound-real.json`.

    Args:
        target: a model whose layers can be called one by one.
        per_kind: chat prompts of each kind.
        tokens: most of each text.
        exits: a folder of trained heads, shown beside the model's own; if it holds none they are
            trained there before, which goes on where it was interrupted.
    """
    if exits is not None and not (exits / ABOUT).is_file():
        _train(target, exits)
    model = forerun.load(target, draft="none", runtime="torch", dtype="float32")
    asked = [(task.tokens, task.sampling) for task in chats(model, per_kind, tokens)]
    texts = list(written(model, asked))
    access = LayerAccess(model.target.executor.module())
    heads: dict[str, ExitHeads] = {
        "its own head": ExitHeads(access),
        f"its first {VOCAB:,} tokens": ExitHeads(access, tokens=torch.arange(VOCAB)),
    }  # fmt: skip
    if exits is not None:
        heads["trained heads"] = load_heads(str(exits), access)
    results = {name: _replayed(access, own, texts) for name, own in heads.items()}
    made = provenance(model, prompts=len(texts), tokens=tokens)
    save("specbound-real", made, results, _text(results, texts, access))


def _train(target: str, folder: Path) -> None:
    """`forerun train-draft exits` on what the target answers to made-up prompts."""
    nothing = Sources([], [], [], [])
    asked = [prompt_of(MADE[i % len(MADE)], random.Random(i), nothing) for i in range(800)]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "max_new_tokens": 128}) for prompt in asked]
    data.write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "forerun",
        "train-draft",
        "exits",
        "--target",
        target,
        "--chat",
    ]
    command += ["--data", str(data), "--output", str(folder), *TRAINING]
    subprocess.run(command, check=True)


def _projection(access: LayerAccess, tokens: int) -> float:
    """Layers whose weights a projection onto so many tokens reads as many of."""
    layer = sum(p.numel() for p in access.model.model.layers[0].parameters())
    return tokens * access.width / layer


def _replayed(access: LayerAccess, heads: ExitHeads, texts: list[OwnText]) -> dict[str, Any]:
    """The best settings by weights read, with and without annealing; and annealings at one."""
    layers = candidates(heads.layers)
    trace = ExitTrace.record(heads, layers, texts)
    whole = _projection(access, access.unembedding.shape[0])
    asked = whole if heads.tokens is None else _projection(access, len(heads.tokens))
    costs = {"layers": 1.0, "exits": asked, "steps": 0.0, "rounds": whole}
    costs["plain"] = access.layers + whole
    search = ExitSearch(trace, costs)
    depths = layers[1::2]
    used = [(d,) for d in depths] + [tuple(n for n in layers if n <= d) for d in depths]
    for exits, threshold, anneal in product(used, THRESHOLDS, SHOWN):
        search.score(Setting(exits, threshold, anneal, WIDTH))
    best = search.best
    without = max((s for s in search.scores if s.anneal == 0), key=search.score)
    cases = {"best": best, "best without annealing": without} | {
        f"every exit, τ = {SURE}, a = {a:g}": Setting(layers, SURE, a, WIDTH) for a in SHOWN
    }
    return {
        "layers": layers,
        "projection": asked,
        "cases": {name: _case(search, setting) for name, setting in cases.items()},
    }  # fmt: skip


def _case(search: ExitSearch, setting: Setting) -> dict[str, Any]:
    counts = {name: int(values.sum()) for name, values in search.exits.counts(setting).items()}
    positions = search.exits.positions
    return {
        "spec": setting.spec(""),
        "speed": search.score(setting),
        "per_round": positions / counts["rounds"],
        "drafted": counts["steps"] / counts["rounds"],
        "layers": counts["layers"] / positions,
        "exits": counts["exits"] / positions,
    }


def _text(results: dict[str, Any], texts: list[OwnText], access: LayerAccess) -> str:
    header = ["heads", "setting", "predicted, × plain", "tokens a round", "climbing a round",
              "layers a token", "exits asked a token"]  # fmt: skip
    rows = [
        [
            name,
            case if case.startswith("every") else f"{case}: `{f['spec']}`",
            f"{f['speed']:.2f}",
            f"{f['per_round']:.2f}", f"{f['drafted']:.2f}", f"{f['layers']:.1f}",
            f"{f['exits']:.1f}",
        ]
        for name, own in results.items()
        for case, f in own["cases"].items()
    ]  # fmt: skip
    projections = ", ".join(f"{name} {own['projection']:.2f}" for name, own in results.items())
    return (
        f"{len(texts)} chat prompts of eight kinds, {sum(len(t.output) for t in texts)} greedy "
        f"tokens, {access.layers} layers; rounds and tokens are those of the live engine, time is "
        f"weights read: layers that a projection is as large as: {projections}; of the whole "
        "vocabulary once a round.\n\n" + table(header, rows)
    )
