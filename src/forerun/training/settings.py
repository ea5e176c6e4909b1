"""How drafts that belong to a target are trained."""

from dataclasses import dataclass
from typing import Any

from forerun.checks import choice, whole
from forerun.errors import require

TRAINERS = {
    "shared": "grafts:GraftTrainer",
    "block": "grafts:GraftTrainer",
    "kangaroo": "heads:AdapterTrainer",
    "medusa": "heads:MedusaTrainer",
    "exits": "heads:ExitTrainer",
    "eagle": "eagle:EagleTrainer",
    "eagle3": "eagle:Eagle3Trainer",
}
"""Kinds of drafts, and who trains each."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "shared": {"layers": (1,), "width": 1},
    "block": {"layers": (1,), "width": 8},
    "kangaroo": {"layers": (2,), "width": 1},
    "medusa": {"layers": (1,), "width": 5},
    "exits": {"batch": 8, "lr": 0.0, "width": 1},
    "eagle": {"batch": 8, "lr": 2e-3, "width": 256, "vocab": None},
    "eagle3": {"batch": 8, "lr": 1e-3, "width": 1, "vocab": None},
}
"""What settings are where they are None."""


@dataclass(frozen=True)
class TrainingSettings:
    """How a draft is trained; what is None is the kind's own default.

    Args:
        kind: of `TRAINERS`.
        layers (N[,N...]): of shared and block, the layers of the draft's decoder (default 1); of
            medusa, residual blocks of a head (1); of kangaroo, the target's layers below the
            adapter (2); of exits, the layers to exit after (about six, evenly spaced); of eagle and
            eagle3, the depths whose states are read (of eagle a third, two thirds and all of the
            layers; of eagle3 2, half and all of them).
        width (K): of block, tokens proposed in a pass, ≥ 2 (default 8); of medusa, heads (5); of
            eagle, of the layer, a multiple of 64 (256).
        steps: optimiser steps, ≥ 1.
        batch (B): texts per step, ≥ 1 (default 32, of exits, eagle and eagle3 8).
        lr: peak learning rate (default 0.001, of eagle 0.002, of exits 0.25 / H); rises over a
            twentieth of the steps, falls to zero over all.
        anchors: of block, places per text behind which a block is learned, ≥ 1.
        seed (S): decides order, anchors and whatever begins at random.
        vocab: of medusa, exits, eagle and eagle3, how many tokens the draft can say, the most
            frequent in the texts; 0 is all (default, but of eagle and eagle3 a third of the
            target's, at most 8192).
        loss (hard|distill): of exits, "hard" (cross-entropy to the last layer's arg-max: confidence
            is then the chance that it agrees) or "distill" (forward KL from its distribution).
    """

    kind: str = "shared"
    layers: tuple[int, ...] | None = None
    width: int | None = None
    steps: int = 1000
    batch: int | None = None
    lr: float | None = None
    anchors: int = 4
    seed: int = 0
    vocab: int | None = None
    loss: str = "hard"

    def __post_init__(self) -> None:
        choice("kind", self.kind, list(TRAINERS))
        general = {"batch": 32, "lr": 1e-3, "vocab": 0, "layers": ()}
        for name, value in (general | DEFAULTS[self.kind]).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("steps", "batch", "anchors"):
            whole(name, getattr(self, name), 1)
        for name in ("seed", "vocab"):
            whole(name, getattr(self, name) or 0)
        assert self.layers is not None
        for layer in self.layers:
            whole("layers", layer, 1)
        heads = ("exits", "eagle", "eagle3")
        if self.kind not in heads:
            require(len(self.layers) == 1, "layers", self.layers, f"one number for {self.kind}")
        whole("width", self.width, 2 if self.kind == "block" else 1)
        if self.kind == "eagle":
            require(self.width % 64 == 0, "width", self.width, "a multiple of 64")  # type: ignore[operator]
        only = self.kind in ("medusa", *heads) or not self.vocab
        require(only, "vocab", self.vocab, f"0 for a draft of kind {self.kind}")
        choice("loss", self.loss, ["hard", "distill"])
        good = self.lr is not None and 0 <= self.lr < 1 and (self.lr > 0 or self.kind == "exits")
        require(good, "lr", self.lr, "between 0 and 1")

    @property
    def on_encoder(self) -> bool:
        return self.kind in ("shared", "block")

    @property
    def depth(self) -> int:
        """The only number of `layers`."""
        assert self.layers is not None
        return self.layers[0]
