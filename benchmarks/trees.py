"""What token trees would bring over leaves, by replay: tokens a round by nodes and depth.

A node of a tree is judged behind its own path, and what the draft says behind a true prefix is in
a trace, whatever was drafted there. So a round over any tree of fixed shape can be followed: it
keeps the text's tokens as far as their ranks, in the draft's order, lead through the tree. Behind a
second choice the draft is taken to be as good as where a draft begins, which flatters trees. Shapes
are fitted to the other half of the prompts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from benchmarks.common import provenance, resumed, save, table
from benchmarks.drafters import tasks_of
from benchmarks.leaves import with_poor_draft
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.results import rate
from forerun.lab.traces.trace import Trace
from forerun.types import IntArray

Node = tuple[int, ...]
"""A node of a tree: the ranks that lead to it."""
NODES, DEPTHS = (8, 16, 32), (4, 8)
SHIPPED = {"draft model": None, "poor draft": None, "kangaroo": "kangaroo(threshold=0)"}
REAL = {"eagle": "eagle"}


def main(prompts: int, tokens: int, target: str | None) -> None:
    """Write `trees.json`; of another target, a GGUF file, with its name behind."""
    name = "-".join(["trees", *([Path(target).stem.lower()] if target else [])])
    settings = {"prompts": prompts, "tokens": tokens}
    results = resumed(name, **settings)
    drafts = REAL if target else SHIPPED
    for drafter in [drafter for drafter in drafts if drafter not in results]:
        how: dict[str, Any] = {} if target else {"dtype": "float32", "runtime": "torch"}
        poor = drafter == "poor draft"
        model = with_poor_draft() if poor else forerun.load(target, drafts[drafter], **how)
        work = tasks_of(model, target, prompts, tokens)
        results[drafter] = _bounds(record(model, work, depth=max(DEPTHS), batch_size=1))
        save(name, provenance(model, **settings), results, _text(results))


def live(prompts: int, tokens: int, target: str | None) -> None:
    """Write `trees-live.json`, counted in the engine; of another target with its name behind."""
    name = "-".join(["trees-live", *([Path(target).stem.lower()] if target else [])])
    settings = {"prompts": prompts, "tokens": tokens}
    results = resumed(name, **settings)
    for drafter in [one for one in (REAL if target else ("draft model", "poor draft"))
                    if one not in results]:  # fmt: skip
        how: dict[str, Any] = {} if target else {"dtype": "float32", "runtime": "torch"}
        poor = drafter == "poor draft"
        model = with_poor_draft() if poor else forerun.load(target, REAL.get(drafter), **how)
        work = tasks_of(model, target, prompts, tokens)
        results[drafter] = {str(depth): _counted(model, work, depth) for depth in DEPTHS}
        save(name, provenance(model, **settings), results, _live_text(results))


def _counted(model: forerun.Model, work: Sequence[Task], depth: int) -> dict[str, Any]:
    """By shape nodes a round, tokens a round, and rounds of chains and of leaves over its own. Time
    has no say: the draft is as deep in every round."""
    free = f"auto(high={depth},cost=1000000,slope=0"
    specs = {
        "chain": f"{free})",
        "leaves": f"{free},leaves={depth})",
        **{f"tree of {n}": f"{free},tree={n})" for n in NODES},
    }
    rounds, texts, out = {}, {}, {}
    for shape, spec in specs.items():
        done = [
            model.generate([task.tokens], sampling=[task.sampling], controller=spec)[0]
            for task in work
        ]
        rounds[shape], texts[shape] = [c.stats.rounds for c in done], [c.tokens for c in done]
        counted = [r.drafted + r.counters.get("leaves", 0) for c in done for r in c.rounds]
        out[shape] = {
            "nodes": round(float(np.mean(counted)), 2),
            "tokens_per_round": round(sum(map(len, texts[shape])) / sum(rounds[shape]), 4),
            "kept_beside": sum(c.stats.counters.get("leaves_kept", 0) for c in done),
            "texts": sum(a == b for a, b in zip(texts[shape], texts["chain"], strict=True)),
            **{f"over_{other}": rate(rounds[other], rounds[shape])
               for other in ("chain", "leaves") if other in rounds},
        }  # fmt: skip
    return out


def _bounds(trace: Trace) -> dict[str, Any]:
    """By depth, then by shape: nodes, tokens a round, and rounds of leaves over its own."""
    out: dict[str, Any] = {}
    for depth in DEPTHS:
        ranks = ranks_of(trace, depth)
        own, halves = (ranks == 0).cumprod(-1).sum(-1), np.arange(trace.prompts) % 2

        def fitted(nodes: int, ranks: IntArray = ranks, halves: IntArray = halves) -> IntArray:
            kept = np.zeros(ranks.shape[:-1], np.int64)
            for half in (0, 1):
                others = trace.valid & (halves != half)[:, None]
                kept[halves == half] = kept_by(best_tree(ranks[others], nodes), ranks)[
                    halves == half
                ]
            return kept

        behind = np.take_along_axis(ranks, np.minimum(own, depth - 1)[..., None], -1)[..., 0]
        kept = {
            "chain": (depth, own),
            "leaves": (2 * depth, own + ((own < depth) & (behind == 1))),
            **{f"tree of {n}": (n, fitted(n)) for n in NODES},
            "in hindsight": (NODES[-1], kept_by(best_tree(ranks[trace.valid], NODES[-1]), ranks)),
            "all first and second": (
                2 ** (depth + 1) - 2, ((ranks == 0) | (ranks == 1)).cumprod(-1).sum(-1)
            ),
        }  # fmt: skip
        rounds = {shape: rounds_of(trace, own) for shape, (_, own) in kept.items()}
        out[str(depth)] = {
            shape: {
                "nodes": nodes,
                "tokens_per_round": float(trace.sizes.sum() / rounds[shape].sum()),
                "over_leaves": rate(rounds["leaves"], rounds[shape]),
            }
            for shape, (nodes, _) in kept.items()
        }
    return out


def ranks_of(trace: Trace, depth: int) -> IntArray:
    """`(prompts, T, depth)` how many tokens the draft prefers to the text's, at each place of a
    draft from each position; −1 beyond the text and where the draft says nothing."""
    positions, rank = trace.tokens.shape[1], trace.judged["target_rank"]
    out = np.full((*trace.tokens.shape, depth), -1)
    for place in range(min(depth, positions)):
        on = (place <= trace.matches) & (place < trace.lengths)
        later = np.arange(positions) + place
        at = np.minimum(later, positions - 1)
        known = (later < trace.sizes[:, None]) & (on | (trace.lengths[:, at] > 0))
        out[..., place] = np.where(known, np.where(on, rank[..., place], rank[:, at, 0]), -1)
        out[..., place][known & (place < trace.matches)] = 0
    return out


def best_tree(paths: IntArray, nodes: int) -> list[Node]:
    """The tree of so many nodes that keeps most tokens over all paths, `(n, depth)` ranks. A node
    is on no more of them than the one before it, so the best is grown node by node."""
    order, tree = itertools.count(), list[Node]()

    def grow(node: Node, through: IntArray) -> Iterator[tuple[int, int, Node, IntArray]]:
        if len(node) < paths.shape[1]:
            own = paths[through, len(node)]
            for rank in np.unique(own[own >= 0]).tolist():
                index = through[own == rank]
                yield -len(index), next(order), (*node, rank), index

    ahead = list(grow((), np.arange(len(paths))))
    heapq.heapify(ahead)
    while ahead and len(tree) < nodes:
        _, _, node, through = heapq.heappop(ahead)
        tree.append(node)
        for child in grow(node, through):
            heapq.heappush(ahead, child)
    return tree


def kept_by(tree: list[Node], ranks: IntArray) -> IntArray:
    """`(...,)` tokens that a tree keeps of `(..., depth)` ranks."""
    kept = np.zeros(ranks.shape[:-1], np.int64)
    for node in tree:
        kept += (ranks[..., : len(node)] == node).all(-1)
    return kept


def rounds_of(trace: Trace, kept: IntArray) -> IntArray:
    """`(prompts,)` rounds, where those from each position keep so many tokens."""
    at, rounds = np.zeros((2, trace.prompts), np.int64)
    while (on := np.flatnonzero(at < trace.sizes)).size:
        at[on] += kept[on, at[on]] + 1
        rounds[on] += 1
    return rounds


def _text(results: dict[str, Any]) -> str:
    return (
        "Greedy prompts. Tokens a round, if a draft of so many steps is judged as a chain; with "
        "the second choice beside each of its tokens (leaves: twice as many nodes); as a tree of "
        "fixed shape with so many nodes, the best for the other half of the prompts, and with "
        f"{NODES[-1]} for these very ones; with all first and second choices, in any order. "
        "Then the rounds with leaves over those with a tree, with a 95 % bootstrap interval.\n\n"
        + _rows(results, lambda one: f"{one['tokens_per_round']:.2f}")
    )


def _live_text(results: dict[str, Any]) -> str:
    return (
        "Greedy prompts, in the engine: tokens a round (and nodes that the target judged) of "
        "drafts of so many steps, alone; with the second choice beside each token; with a tree of "
        "so many nodes grown in the same steps. Then the rounds with leaves over those with a "
        "tree, with a 95 % bootstrap interval.\n\n"
        + _rows(results, lambda one: f"{one['tokens_per_round']:.2f} ({one['nodes']:.1f})")
    )


def _rows(results: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> str:
    """A row for each draft and depth, by shape, and the shapes of `NODES` over leaves."""
    rows = [
        [
            f"{drafter}, depth {depth}",
            *map(cell, shapes.values()),
            *("{mean:.3f} [{low:.3f}, {high:.3f}]".format(**shapes[f"tree of {n}"]["over_leaves"])
              for n in NODES),
        ]
        for drafter, own in results.items() for depth, shapes in own.items()
    ]  # fmt: skip
    shapes = list(next(iter(next(iter(results.values())).values())))
    return table(["draft", *shapes, *(f"{n} over leaves" for n in NODES)], rows)
