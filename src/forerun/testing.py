"""Scripted models: test a policy, a rule or the whole engine without any weights.

>>> import torch
>>> from forerun.testing import ScriptedModel, engine
>>> table = torch.eye(5).roll(1, dims=1) * 9    # after token t comes t + 1, almost surely
>>> run = engine(target=ScriptedModel(table), draft=ScriptedModel(table))
>>> run([0], max_new_tokens=4, controller="fixed(3)").tokens
[1, 2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters import Drafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Completion, Engine, Sampling
from forerun.rules import RULES

Script = torch.Tensor | Callable[[tuple[int, ...]], torch.Tensor]


class ScriptedModel:
    """A runtime whose logits come from a script instead of weights.

    Args:
        script: `(V, V)` logits of the next token given the last one, or a function from the whole
            context (a tuple of ids) to `(V,)` logits.
        limit: its context length in tokens.
    """

    def __init__(self, script: Script, limit: int = 1 << 20) -> None:
        self._script, self.limit = script, limit
        self.device = torch.device("cpu")
        self.seconds = 0.0
        self.forwards = 0
        self.history: list[list[int]] = []
        """Tokens covered by each row's cache: what the engine really fed."""

    @property
    def lengths(self) -> list[int]:
        """Tokens covered per row."""
        return [len(tokens) for tokens in self.history]

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        return int(self._logits((0,)).shape[-1])

    def _logits(self, context: tuple[int, ...]) -> torch.Tensor:
        return self._script(context) if callable(self._script) else self._script[context[-1]]

    def join(
        self, prompts: Sequence[Sequence[int]], room: int = 0, leave_end: bool = False
    ) -> None:
        """Add rows that cover their prompts but for the last token, or nothing of them yet."""
        self.history.extend([] if leave_end else list(p[:-1]) for p in prompts)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.history = [self.history[r] for r in rows]

    def rollback(self, row: int, length: int) -> None:
        """Forget what a row holds beyond `length` tokens."""
        del self.history[row][length:]

    def feed(
        self,
        pieces: Sequence[Sequence[int]],
        first: int = 0,
        want: Literal["all", "last", "none"] = "all",
        skip: int = 0,
    ) -> torch.Tensor:
        """Cover the pieces and return the scripted logits (NaN where they mean nothing)."""
        self.forwards += 1
        width, nothing = max(map(len, pieces)), torch.full((self.vocab_size,), torch.nan)
        rows = []
        for row, piece in enumerate(pieces, start=first):
            seen = []
            for token in piece:
                self.history[row].append(token)
                assert len(self.history[row]) <= self.limit, "fed beyond the context"
                seen.append(self._logits(tuple(self.history[row])))
            rows.append(seen)
        if want == "last":
            return torch.stack([seen[-1] if seen else nothing for seen in rows])
        return torch.stack([torch.stack(s + [nothing] * (width - len(s))) for s in rows])[:, skip:]


def engine(
    target: ScriptedModel,
    draft: ScriptedModel | Drafter | None = None,
    eos: Sequence[int] = (),
    max_rows: int = 16,
) -> Callable[..., Any]:
    """A function `run(prompt | prompts, controller=..., rule=..., **sampling)` over scripts.

    It returns a `Completion` for one prompt (a list of ids) and a list for many; `draft` is a
    scripted model, any drafter, or None for plain decoding.
    """
    if draft is None:
        draft = NullDrafter()
    drafter = draft if isinstance(draft, Drafter) else ModelDrafter(draft, target.vocab_size)
    made = Engine(target, drafter, eos=frozenset(eos), max_rows=max_rows)

    def run(
        prompts: Sequence[Any], controller: Any = "fixed", rule: Any = "standard", **sampling: Any
    ) -> Completion | list[Completion]:
        one = isinstance(prompts[0], int)
        ids = [
            made.submit(p, Sampling(**sampling), CONTROLLERS.make(controller), RULES.make(rule))
            for p in ([prompts] if one else prompts)
        ]
        done = {e.request: e.completion for e in made.run() if e.completion is not None}
        results = [done[i] for i in ids]
        return results[0] if one else results

    return run
