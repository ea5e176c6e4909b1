"""What trees grown best first by a head's own probabilities would bring over chains and leaves, by
counting: the head is run along every branch, so a node says what it would say in use.

At every place of a target's greedy texts a tree is grown node by node, always the likeliest next
one, as EAGLE-2 does; the first N nodes are the tree of N. Rounds are followed over it, and priced
by measured passes. A step of the draft is charged for every level and for the nodes on it that have
children in the tree, as if they were known before: a bound from above of what trees bring.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

import forerun
from benchmarks.common import provenance, save, table
from benchmarks.starting_lengths import chats
from forerun.drafters.eagle import shipped_head
from forerun.lab.traces.record import Task
from forerun.runtime.eagle import EagleHead, load_eagle
from forerun.types import FloatArray, IntArray

CHAINS, LEAVES, NODES = (2, 3, 4, 5, 6, 8), (1, 4), (4, 8, 16, 32)
LEVELS, BRANCHES = 10, 8
"""Most tokens of a path, and most children of a node."""
FLOORS = 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6
"""Chances that all of a path is kept below which a draft of variable size takes no more nodes."""
ENOUGH = 2.0
"""Tokens that `memory` must expect to be kept to go before the head, as `chain` has it."""


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of passes by tokens, of a step of the draft, and of each further node in it."""

    passes: tuple[tuple[int, float], ...]
    step: float
    node: float

    def round(self, width: FloatArray, levels: FloatArray, more: FloatArray) -> FloatArray:
        """Of rounds that judge so many nodes, of a draft of so many levels and further nodes."""
        known, taken = zip(*self.passes, strict=True)
        out: FloatArray = np.interp(width + 1, known, taken)
        return out + self.step * levels + self.node * more


MACHINES = {
    "CPU": Machine(
        ((1, 12.3), (2, 12.8), (4, 14.5), (5, 15.2), (8, 17.6), (12, 20.6), (16, 23.7), (32, 35.9),
         (33, 36.7)), 0.54, 0.06,
    ),
    "GPU": Machine(((1, 10.7), (4, 11.6), (16, 12.3), (33, 13.3)), 0.47, 0.0),
}  # fmt: skip
"""SmolLM2 Q4_1 on Zen 4 with VNNI, two threads; a target of 14B on an H200 (up to 16 tokens
measured), with a head that takes as large a share of a pass."""


@dataclass(frozen=True)
class Grown:
    """Trees at R places of a text, in the order in which their N nodes were grown.

    Args:
        chance: `(R, N)` of all of a node's path, falling.
        level: `(R, N)` from 0 on.
        parent: `(R, N)` nodes, −1 behind the text.
        right: `(R, N)` whether the path is what the target says.
    """

    chance: FloatArray
    level: IntArray
    parent: IntArray
    right: IntArray

    def cost(self, sizes: IntArray) -> tuple[FloatArray, FloatArray]:
        """`(R,)` levels, and nodes beside the first of each level that have children, of the first
        so many nodes."""
        levels, more = np.zeros((2, len(sizes)))
        for place, size in enumerate(sizes):
            stepped = {-1, *self.parent[place, :size].tolist()} if size else set()
            levels[place] = self.level[place, :size].max(initial=-1) + 1
            more[place] = len(stepped) - levels[place]
        return levels, more

    def sized(self, most: int, floor: float = 0.0) -> IntArray:
        """`(R,)` at most so many nodes, of no smaller chance."""
        out: IntArray = (self.chance[:, :most] >= floor).sum(1)
        return out

    def kept(self, sizes: IntArray) -> IntArray:
        """`(R,)` tokens kept of the first so many nodes."""
        counted = np.arange(self.right.shape[1]) < sizes[:, None]
        out: IntArray = (self.right.astype(bool) & counted).sum(1)
        return out


@dataclass(frozen=True)
class Text:
    """A greedy text as its drafts see it, at each place from its first answer token on but the
    last: trees, chains, and the chance and rightness of the chain's second choices."""

    kind: str
    tree: Grown
    chain: Grown
    second: FloatArray
    second_right: IntArray
    memory: Grown


class Grower:
    """Grows trees at every place of a text by a head, from the states `(T, depths × H)` of its
    target. Ids are the head's own; V stands for any that it cannot say."""

    def __init__(
        self, head: EagleHead, ids: Sequence[int], states: torch.Tensor, depths: int, first: int
    ) -> None:
        self._head, self._ids, self._first = head, torch.tensor(ids), first
        before = F.pad(head.fused(states[:-1], depths), (0, 0, 1, 0))
        kept: list[torch.Tensor] = []

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kept.extend((k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        places = torch.arange(len(ids))
        self._states = head.layer(self._ids[None], before[None], places[None], attend)[0]
        self._keys, self._values = kept
        self._places = places[first:-1]

    def grow(self, nodes: int, branches: int) -> tuple[Grown, FloatArray, IntArray]:
        """Trees of so many nodes, each with at most so many children; then of each node's parent
        the chance and the rightness of its second choice."""
        roots, count = len(self._places), len(self._ids)
        heads, width = self._keys.shape[1], self._keys.shape[3]
        own = torch.zeros(2, roots, heads, nodes, width)
        seen = torch.zeros(roots, nodes, nodes, dtype=torch.bool)
        outputs = torch.zeros(roots, nodes, self._head.width)
        parent, level = (np.zeros((roots, nodes), int) for _ in range(2))
        right, second_right = (np.zeros((roots, nodes), int) for _ in range(2))
        chance, second = np.zeros((roots, nodes)), np.zeros((roots, nodes))
        ahead: list[list[Any]] = [[] for _ in range(roots)]
        text = [*self._ids.tolist(), *[-1] * (LEVELS + 1)]
        self._offer(ahead, self._states[self._first : -1], np.full(roots, -1), [1.0] * roots,
                    np.zeros(roots, int), branches)  # fmt: skip
        for n in range(nodes):
            ids = torch.zeros(roots, 1, dtype=torch.long)
            for r, waiting in enumerate(ahead):
                if not waiting:  # all paths are at their longest
                    parent[r, n], level[r, n] = -1, 0
                    continue
                loss, p, place, token, beside, of_beside = heapq.heappop(waiting)
                true = text[int(self._places[r]) + 1 + place]
                on = p < 0 or bool(right[r, p])
                chance[r, n], parent[r, n], level[r, n], ids[r] = -loss, p, place, token
                right[r, n], second[r, n] = on and token == true, of_beside
                second_right[r, n] = on and beside == true
                if p >= 0:
                    seen[r, n] = seen[r, p]
                seen[r, n, n] = True
            if n + 1 == nodes:
                break
            rows, above = torch.arange(roots), torch.from_numpy(parent[:, n])
            before = torch.where(
                above[:, None] < 0, self._states[self._places], outputs[rows, above.clamp(min=0)]
            )
            places = self._places[:, None] + 1 + torch.from_numpy(level[:, n])[:, None]
            visible = torch.cat(
                [torch.arange(count) <= self._places[:, None], seen[:, n]], 1
            )[:, None, None]  # fmt: skip

            def attend(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: int = n,
                visible: torch.Tensor = visible,
            ) -> torch.Tensor:  # fmt: skip
                own[0, :, :, n], own[1, :, :, n] = k[:, :, 0], v[:, :, 0]
                keys, values = (
                    torch.cat([known.expand(roots, -1, -1, -1), new], 2)
                    for known, new in zip((self._keys, self._values), own, strict=True)
                )
                return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)

            outputs[:, n] = self._head.layer(ids, before[:, None], places, attend)[:, 0]
            self._offer(ahead, outputs[:, n], np.full(roots, n), chance[:, n].tolist(),
                        level[:, n] + 1, branches)  # fmt: skip
        return Grown(chance, level, parent, right), second, second_right

    def _offer(
        self, ahead: list[list[Any]], x: torch.Tensor, parent: IntArray, before: list[float],
        level: IntArray, branches: int,
    ) -> None:  # fmt: skip
        """Children of nodes, by their chances."""
        shares, tokens = self._head.logits(x).softmax(-1).topk(max(branches, 2))
        for r, (own, ids) in enumerate(zip(shares.tolist(), tokens.tolist(), strict=True)):
            if level[r] < LEVELS and before[r] > 0:
                for share, token in zip(own[:branches], ids, strict=False):
                    heapq.heappush(ahead[r], (-before[r] * share, int(parent[r]), int(level[r]),
                                              token, ids[1], before[r] * own[1]))  # fmt: skip


def main(target: str, prompts: int, tokens: int) -> None:
    """Write `grown-trees-NAME.json` of a GGUF file with a head that ships for it."""
    model = forerun.load(target, "memory+eagle")
    work = chats(model, prompts, tokens)
    seen = [text for task in work if (text := _seen(model, task)) is not None]
    results = {
        f"{name}, {machine}": _table(seen, costs, name != "eagle")
        for name in ("eagle", "memory, then eagle") for machine, costs in MACHINES.items()
    }  # fmt: skip
    made = provenance(model, prompts=prompts, tokens=tokens)
    save(f"grown-trees-{Path(target).stem.lower()}", made, results, _text(results))


@torch.inference_mode()
def _seen(model: forerun.Model, task: Task) -> Text | None:
    """The target's text behind a prompt, as drafts see it; None if it is a token."""
    rows, drafter = model.target, cast(Any, model.drafter)
    done = model.generate([task.tokens], sampling=[task.sampling], plain=True)[0]
    text, first = [*task.tokens, *done.tokens], len(task.tokens)
    if len(text) < first + 2:
        return None
    states = rows.executor.states
    assert states is not None
    rows.join(1, len(text))
    rows.feed([text], [0])
    own = states.read(0, 0, len(text)).float()
    rows.keep([])
    head, tokens = load_eagle(
        str(shipped_head(rows.facts.identity)), states.width, rows.executor.module(),
        rows.vocab_size,
    )  # fmt: skip
    index = dict(zip(tokens.tolist(), range(len(tokens)), strict=True))
    ids = [index.get(token, len(tokens)) for token in text]
    grower = Grower(head, ids, own, len(states.depths), first)
    tree, _, _ = grower.grow(max(NODES), BRANCHES)
    chain, second, second_right = grower.grow(max(CHAINS), 1)
    return Text(task.family, tree, chain, second, second_right, _remembered(drafter, text, first))


def _remembered(drafter: Any, text: list[int], first: int) -> Grown:
    """What `memory` drafts at each place."""
    memory, most = drafter._first, max(CHAINS)
    memory.join([text[:first]], len(text))
    count = len(text) - 1 - first
    chance, right = np.zeros((2, count, most))
    for r in range(count):
        ahead, chances = memory.draft(len(memory._rows) - 1, text[: first + r + 1], most)
        true = text[first + r + 1 :]
        chance[r, : len(chances)] = np.cumprod(chances)
        for place in range(len(ahead)):
            right[r, place] = ahead[: place + 1] == true[: place + 1]
    memory.keep([])
    places = np.arange(most) + np.zeros((count, 1), int)
    return Grown(chance, places, places - 1, right.astype(int))


Shape = tuple[IntArray, IntArray, FloatArray, FloatArray]
"""Per place tokens kept, nodes judged, and levels and further nodes of the draft."""


def _shapes(text: Text) -> Iterator[tuple[str, Shape]]:
    """Every kind of draft, each with every setting."""
    for floor in (0.0, *FLOORS):
        behind = f", from {floor}" if floor else ""
        for length in CHAINS:
            sizes = text.chain.sized(length, floor)
            kept = text.chain.kept(sizes)
            none = np.zeros(len(sizes))
            yield f"chain of {length}{behind}", (kept, sizes, sizes + none, none)
            for count in LEAVES:
                beside = text.second[:, :length] * (np.arange(length) < sizes[:, None])
                order = np.argsort(-beside, axis=1)[:, :count]
                taken = np.take_along_axis(beside, order, 1) > floor
                hit = (np.take_along_axis(text.second_right, order, 1) * taken).sum(1)
                shape = (kept + hit, sizes + taken.sum(1), sizes + none, none)
                yield f"chain of {length}, {_leaves(count)}{behind}", shape
        for nodes in NODES:
            sizes = text.tree.sized(nodes, floor)
            yield f"tree of {nodes}{behind}", (text.tree.kept(sizes), sizes, *text.tree.cost(sizes))


def _with_memory(text: Text, shape: Shape, most: int) -> Shape:
    """`memory` in place of the head where it expects enough."""
    own = text.memory
    sizes = own.sized(min(most, own.right.shape[1]), 1e-9)
    expects = (own.chance * (np.arange(own.chance.shape[1]) < sizes[:, None])).sum(1) >= ENOUGH
    kept, nodes, levels, more = shape
    return (
        np.where(expects, own.kept(sizes), kept), np.where(expects, sizes, nodes),
        np.where(expects, 0, levels), np.where(expects, 0, more),
    )  # fmt: skip


def _followed(shape: Shape, costs: Machine) -> tuple[int, int, float]:
    """Tokens, rounds and milliseconds of a text."""
    kept, nodes, levels, more = shape
    took = costs.round(nodes, levels, more)
    at = rounds = 0
    spent = 0.0
    while at < len(kept):
        spent, rounds, at = spent + float(took[at]), rounds + 1, at + int(kept[at]) + 1
    return len(kept), rounds, spent


def _table(seen: Sequence[Text], costs: Machine, memory: bool) -> dict[str, Any]:
    """By kind of draft its setting, the fastest in hindsight where there are several: tokens a
    round, speed over plain decoding, and over the best chain without and with one leaf."""
    one = float(costs.round(np.zeros(1), np.zeros(1), np.zeros(1))[0])
    found: dict[str, list[tuple[int, int, float]]] = {}
    for text in seen:
        for name, shape in _shapes(text):
            if memory:
                shape = _with_memory(text, shape, int(name.split()[2].rstrip(",")))
            found.setdefault(name, []).append(_followed(shape, costs))
    times = {name: sum(t for _, _, t in own) for name, own in found.items()}
    tokens = sum(n for n, _, _ in next(iter(found.values())))

    def best(belongs: Callable[[str], bool]) -> str:
        return min(filter(belongs, times), key=times.__getitem__)

    kinds = {
        **{f"chain of {n}": f"chain of {n}" for n in CHAINS},
        "best chain, by chance": best(lambda n: n.startswith("chain") and "lea" not in n),
        **{f"with {_leaves(k)} at most": best(lambda n, k=k: _leaves(k) in n) for k in LEAVES},
        **{f"tree of {n}": f"tree of {n}" for n in NODES},
        **{
            f"tree of {n} at most, by chance": best(
                lambda name, n=n: name.startswith(f"tree of {n},")
            )
            for n in NODES
        },
    }
    others = kinds["best chain, by chance"], kinds[f"with {_leaves(1)} at most"]
    drawn = np.random.default_rng(0).integers(0, len(seen), (2000, len(seen)))
    kinds_of = np.array([text.kind for text in seen])
    out = {}
    for kind, name in kinds.items():
        own, *against = (np.array([t for _, _, t in found[key]]) for key in (name, *others))
        by_kind = [float(against[0][kinds_of == k].sum() / own[kinds_of == k].sum())
                   for k in {*kinds_of}]  # fmt: skip
        out[kind] = {
            "setting": name,
            "tokens_per_round": round(tokens / sum(r for _, r, _ in found[name]), 4),
            "speed": round(tokens * one / times[name], 4),
            "worst_kind": round(min(by_kind), 4),
            "over": [_ratio(other, own, drawn) for other in against],
        }
    return out


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def _ratio(other: FloatArray, own: FloatArray, drawn: IntArray) -> dict[str, float]:
    """Of the times of all texts, with a 95 % bootstrap interval over texts drawn."""
    ratios = other[drawn].sum(1) / own[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975]).round(4).tolist()
    return {"mean": round(float(other.sum() / own.sum()), 4), "low": low, "high": high}


def _text(results: dict[str, Any]) -> str:
    parts = []
    for name, kinds in results.items():
        rows = [
            [
                kind,
                one["setting"].partition("from ")[2] or "–",
                f"{one['tokens_per_round']:.2f}",
                f"{one['speed']:.2f}",
                *("{mean:.3f} [{low:.3f}, {high:.3f}]".format(**ratio) for ratio in one["over"]),
                f"{one['worst_kind']:.2f}",
            ]
            for kind, one in kinds.items()
        ]
        header = [name, "least chance", "tokens a round", "× plain", "over best chain",
                  "over one leaf", "worst kind"]  # fmt: skip
        parts.append(table(header, rows))
    return (
        "Greedy texts, counted. A round's time is that of a pass over its nodes and the newest "
        "token, and of the head's steps. × plain: speed over plain decoding by these times; over "
        "best chain: over that of the best chain that ends by the chance of its path, with a 95 % "
        "bootstrap interval over texts, and in the kind of prompt where it gains least; over one "
        "leaf: over that with the chain's likeliest second choice beside it. What ends by chance "
        "has the setting that is fastest on "
        "these very texts.\n\n" + "\n\n".join(parts)
    )
