"""A model in training: its state, what is saved of it, and how a run is watched and stopped."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.optim import optimizers
from recipes.packing import Batch
from recipes.recipe import Architecture, Exits, Guide, Part, Recipe, Unlikely
from recipes.tasks import FAMILIES
from recipes.tasks.base import Pool
from recipes.tokenizer import train_tokenizer

CHECKPOINT = "checkpoint.pt"
TOKENIZER = "tokenizer.json"


@dataclass
class Run:
    """A model in training, all that a checkpoint keeps of it.

    Batches, texts and the choice of exits are functions of seed and step, so no generator is kept.
    """

    model: Any
    optimizers: list[torch.optim.Optimizer]
    recipe: Any
    """A `Recipe`, or one with the same rates and a model of another kind."""
    seed: int
    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    """Seconds of training so far, over all sittings."""
    decay: tuple[int, int] | None = None
    """The step at which the learning rate begins to fall, and how many steps it takes."""

    @classmethod
    def new(
        cls,
        recipe: Any,
        seed: int,
        role: str = "target",
        *,
        start: Path | None = None,
        device: str = "cpu",
    ) -> Run:
        """A run at step 0: fresh weights of the ``role``, or those of an exported model."""
        torch.manual_seed(seed)
        model = getattr(recipe, role).build(recipe.vocab_size)
        if start is not None:
            from transformers import AutoModelForCausalLM

            if not (start / "config.json").exists():
                raise FileNotFoundError(f"no exported model at {start}")
            exported = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
            model.load_state_dict(exported.state_dict())
        model.to(device)
        return cls(model, optimizers([model], recipe), recipe, seed)

    @classmethod
    def load(
        cls,
        path: Path,
        role: str = "target",
        device: str = "cpu",
        read: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Run:
        """A saved run, with the recipe it was begun with; ``read`` makes it of its saved form."""
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: no {path}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        run = cls.new((read or recipe_of)(state["recipe"]), state["seed"], role, device=device)
        run.model.load_state_dict(state["model"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.tokens, run.elapsed = state["step"], state["tokens"], state["elapsed"]
        run.decay = state["decay"]
        return run

    def save(self, path: Path) -> None:
        """Writes beside, then renames: a killed run never leaves half a checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "decay": self.decay,
        }
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        os.replace(beside, path)

    def tensors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch's ids and weights on the model's device."""
        device = next(self.model.parameters()).device
        return torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.weights).to(device)

    def update(self, rate: float) -> None:
        """One optimiser step at ``rate`` times the peak learning rates; clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def advance(self, tokens: int, seconds: float, **measured: Any) -> dict[str, Any]:
        """Counts a finished step; returns its record for the log."""
        self.step += 1
        self.tokens += tokens
        self.elapsed += seconds
        return {
            "step": self.step,
            "tokens": self.tokens,
            **measured,
            "tokens_per_second": round(tokens / seconds),
            "elapsed": round(self.elapsed, 1),
        }


def recipe_of(saved: dict[str, Any]) -> Recipe:
    """A recipe from its saved form; settings that the code has gained since take their default."""
    known = {name: saved[name] for name in Recipe.__dataclass_fields__ if name in saved}
    for name in ("target", "draft"):
        known[name] = Architecture(**known[name])
    known["parts"] = tuple(Part(**part) for part in known["parts"])
    known["exits"] = Exits(**known["exits"])
    if "guides" in known:
        known["guides"] = {
            name: Guide(**how | {"answers": tuple(how["answers"])})
            for name, how in known["guides"].items()
        }
    known["unlikely"] = Unlikely(**known.get("unlikely", {}))
    return Recipe(**known)


def prepare_tokenizer(out: Path, pool: Pool, recipe: Recipe, seed: int) -> Any:
    """The run's tokenizer: read from ``out``, or trained on books and a draw of every family."""
    from tokenizers import Tokenizer

    path = out / TOKENIZER
    if not path.exists():
        rng = random.Random(seed)
        texts = [text for title in sorted(pool.books) for text in pool.books[title]]
        for name in recipe.task_weights:
            for _ in range(recipe.tokenizer_draws * (5 if name == "translation" else 1)):
                example = FAMILIES[name].sample(rng, "train", pool)
                texts.append(example.prompt + example.answer)
        train_tokenizer(texts, recipe.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))
