"""`specbound`: the target's shallow layers draft: early exits, bounded and cached."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Annotated, Any

import torch

from forerun.checks import Count, Named, Within
from forerun.drafters.base import Drafter, DrafterSpec, Proposal, Step, StepContext, Texts
from forerun.drafters.stepping import step_by_step
from forerun.errors import ForerunWarning, SettingError, require
from forerun.runtime.base import Rows
from forerun.runtime.drafts import own_draft, spread
from forerun.runtime.exits import LayersExecutor, layers_of
from forerun.runtime.heads import ExitHeads, load_heads
from forerun.types import Stop

DEFAULTS: dict[str, Any] = {"threshold": 0.7, "anneal": 0.5, "width": 6, "bonus": True}


def temperature(layer: int, layers: int, anneal: float) -> float:
    """`T_ℓ = 1 + a · (1 − ℓ/L)`, the annealed temperature of the exit at layer ℓ (eq. 1).

    >>> temperature(3, 12, anneal=0.4)
    1.3
    """
    return 1.0 + anneal * (1.0 - layer / layers)


@dataclass(eq=False)
class SpecBoundDrafter(Drafter):
    """Steps the target's own shallow layers; made by `SpecBound.build`."""

    rows: Rows
    heads: ExitHeads
    layers: tuple[int, ...]
    threshold: float
    anneal: float
    width: int
    bonus: bool = True

    def __post_init__(self) -> None:
        self.executor, self.target = layers_of(self.rows), self.rows

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.executor.draft_seconds

    def counters(self, row: int) -> Mapping[str, int]:
        passes, exits = self.executor.counts[row] if row < len(self.executor.counts) else (0, 0)
        return {"layer_passes": passes, "exit_projections": exits}

    def ratio(self, target: Rows) -> float:
        """Layers of the target over those a draft may reach."""
        return self.executor.access.layers / self.layers[-1]

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        return step_by_step(self.step, texts, most, guide)

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """Logits of the exit each row's newest token took; rows that took none end as difficult."""
        ended: list[Stop | None] = [None] * len(texts)
        asked: list[list[int] | None] = list(texts)
        for row, (text, covered) in enumerate(zip(texts, self.rows.lengths, strict=True)):
            # All but one token of the text is covered; what is beyond was drafted this round.
            if text is not None and len(text) - 1 - covered >= self.width:
                asked[row], ended[row] = None, Stop.EXHAUSTED
        out: torch.Tensor | None = None
        access, vocab = self.executor.access, self.rows.vocab_size

        def leave(layer: int, rows: list[int], hidden: torch.Tensor) -> list[bool]:
            nonlocal out
            if layer == access.layers:
                logits, sure = access.logits(hidden), [True] * len(rows)
            else:
                logits = self._said(layer, hidden)
                heat = temperature(layer, access.layers, self.anneal)
                top = (logits.float() / heat).softmax(-1).amax(-1)
                sure = (top >= self.threshold).tolist()  # eq. 2
            if sum(sure) == len(texts):  # all at the same exit
                out = spread(logits, self.heads.tokens, vocab)
            elif here := [i for i, yes in enumerate(sure) if yes]:
                out = logits.new_zeros(len(texts), vocab) if out is None else out
                out[[rows[i] for i in here]] = spread(logits[here], self.heads.tokens, vocab)
            if layer == self.layers[-1]:
                for row, yes in zip(rows, sure, strict=True):
                    ended[row] = None if yes else Stop.DIFFICULT
            return sure

        ran = any(text is not None for text in asked)
        if ran:
            self.executor.climb(self.rows.lengths, asked, self.layers, leave)
        return Step(out, ended=ended, ran=ran)

    def _said(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits at an exit, of hidden states `(n, H)`."""
        return self.heads.logits(layer, hidden)


@dataclass(frozen=True)
class SpecBound(DrafterSpec):
    """SpecBound: the target's own shallow layers draft; no draft model, no second cache.

    Args:
        threshold: τ, ≥ 0; 0 exits at the first exit layer, above 1 never. Like the others, the
            value found for the exit heads if they come with one (`forerun sweep specbound`), else
            ours, for the paper's are not in its text: here 0.7.
        anneal: a, ≥ 0; the higher, the surer a shallow layer must be; 0 switches annealing off.
            Else 0.5.
        depth: D, deepest layer a draft may reach, 1 ≤ D ≤ L. Else half of the layers. D = L is no
            bound: a token that no exit is sure of is decoded by all layers, which takes all drafted
            before it along, and drafting goes on. No token is difficult then.
        width: W, most tokens drafted per round, ≥ 1. Else 6. It holds beside the length
            controller's limit; reaching it stops with "exhausted", as a bound of the drafter's and
            not the controller's decision, so controllers do not learn from it. A longer
            `fixed` leaves the length to SpecBound alone.
        layers: exit layers: a number k for every k-th counted down from D, or text like "2,4,6".
            Else every layer that has a trained head, or k = 2 without any. Those beyond D are not
            used; a token that no exit up to D took goes no deeper than the last of them.
        exits: a folder of trained exit heads; empty uses the target's own norm and unembedding at
            every layer (the logit lens). None: the folder `exits` in the target's own, as the
            shipped target has one; the logit lens, with a warning, if there is none.
        bonus: whether verification of W tokens also feeds the last of them, from the embedding up,
            so that a draft accepted whole is followed by a token of the target's own; the paper's
            round does without. Else yes. A difficult token is decoded in any case, and so is the
            last one of a draft that the length controller ends.

    Reference: Wen and Feng 2026 (SpecBound) [specbound2026], sections 2.2 and 2.3. Eqs. 1, 3, 4 and
    5 and the values of τ, a, D and W are blank in the text we have; eq. 1 is reconstructed from
    what it says of it.
    """

    on_torch = True
    threshold: Annotated[float, Within(0, inf)] | None = None
    anneal: Annotated[float, Within(0, 1e6)] | None = None
    depth: Count | None = None
    width: Count | None = None
    layers: Count | str | None = None
    exits: Annotated[str, Named("a folder of exit heads, or none", empty=True)] | None = None
    bonus: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, str):
            listed(self.layers, self.kind)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """With a runtime of its own around the target's model (`Drafter.target`)."""
        rows, heads, exits = exits_of(target, self.exits, self.kind)
        chosen = replace(self, exits=exits)._filled(heads.tuned)
        layers = chosen.exit_layers(layers_of(rows).access.layers, tuple(heads.layers))
        how: Any = chosen.threshold, chosen.anneal, chosen.width, chosen.bonus
        return SpecBoundDrafter(rows, heads, layers, *how)

    def _filled(self, kept: Mapping[str, Any]) -> SpecBound:
        """These settings where given, elsewhere those found for the exit heads, or ours."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        if own["layers"] is not None or own["depth"] is not None:  # they belong together
            kept = {k: v for k, v in kept.items() if k not in ("layers", "depth")}
        try:
            return SpecBound(
                **{**DEFAULTS, **kept, **{k: v for k, v in own.items() if v is not None}}
            )
        except (SettingError, TypeError) as error:
            raise SettingError(f"the settings kept in {self.exits!r} are wrong: {error}") from error

    def exit_layers(self, layers: int, heads: tuple[int, ...]) -> tuple[int, ...]:
        """Exit layers in use for a target of so many layers with heads at `heads`."""
        depth = max(1, layers // 2) if self.depth is None else self.depth
        require(
            1 <= depth <= layers, "specbound depth", depth, f"between 1 and the target's {layers} "
            "layers",
        )  # fmt: skip
        chosen: tuple[int, ...]
        if isinstance(self.layers, str):
            chosen = listed(self.layers, self.kind, heads)
        elif self.layers is None and self.exits:
            chosen = heads
        else:
            every = 2 if self.layers is None else self.layers
            chosen = tuple(layer for layer in range(depth, 0, -every) if layer in heads)
        whole = {layers} if depth == layers else set()  # nothing is left to be difficult
        used = tuple(sorted({layer for layer in chosen if layer <= depth} | whole))
        if not used:
            raise SettingError(
                f"no exit layer up to depth {depth}; raise depth or name layers among "
                f"{', '.join(map(str, heads))}"
            )
        return used


def exits_of(target: Rows, exits: str | None, name: str) -> tuple[Rows, ExitHeads, str | None]:
    """Rows of a target that can be left early, its exit heads, and the folder of these, if any.

    Args:
        target: of an executor with a Hugging Face model behind it; `SettingError` of others.
        exits: as in `SpecBound`.
        name: of the drafter, for messages.
    """
    if (model := target.executor.module()) is None:
        raise SettingError(
            f"{name} runs on torch, and this target on {target.facts.executor or 'none'}; use the "
            "runtime torch"
        )
    rows = Rows(LayersExecutor(model))
    access = layers_of(rows).access
    folder = own_draft(target.facts.name, "exits") if exits is None else exits
    if folder is None:
        warnings.warn(
            f"{name} has no trained exit heads for this target and asks its own head at "
            "every layer, which is rarely sure early; forerun train-draft exits trains them, exits "
            "names their folder (empty: keep the own head, without this warning)",
            ForerunWarning,
            stacklevel=3,
        )
    return rows, load_heads(folder, access) if folder else ExitHeads(access), folder


def listed(text: str, name: str, heads: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers from text like "2,4,6", each with an exit head if these are known; `name` is the
    drafter's, for the message. Raises `SettingError`."""
    words = [word.strip() for word in text.split(",")]
    good = all(word.isdecimal() and int(word) >= 1 for word in words)
    require(good, f"{name} layers", text, 'a whole number or text like "2,4,6"')
    layers = tuple(map(int, words))
    if heads is not None and (missing := [layer for layer in layers if layer not in heads]):
        have = ", ".join(map(str, heads)) or "none"
        raise SettingError(f"no exit head at layers {missing}; there are heads at {have}")
    return layers
