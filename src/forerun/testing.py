"""Scripted models: test a policy, a rule or the whole engine without any weights.

>>> import torch
>>> from forerun.testing import ScriptedModel, engine
>>> table = torch.eye(5).roll(1, dims=1) * 9    # after token t comes t + 1, almost surely
>>> run = engine(target=ScriptedModel(table), draft=ScriptedModel(table))
>>> run([0], max_new_tokens=4, controller="fixed(3)").tokens
[1, 2, 3, 4]
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters import Drafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Completion, Engine, Sampling
from forerun.rules import RULES
from forerun.runtime.attention import Parents
from forerun.runtime.base import Columns, Executor, Facts

Script = torch.Tensor | Callable[[tuple[int, ...]], torch.Tensor]


class ScriptedModel(Executor):
    """An executor whose logits come from a script instead of weights.

    Args:
        script: `(V, V)` logits of the next token given the last one, or a function from the whole
            context (a tuple of ids) to `(V,)` logits.
        limit: its context length in tokens.
        source_limit: of a model with an encoder, the most tokens of a source: the script is then
            given the source and, behind it, the context.
    """

    copies = trees = True

    def __init__(
        self, script: Script, limit: int = 1 << 20, source_limit: int | None = None
    ) -> None:
        self._script = script
        vocab = int(self._logits((0,)).shape[-1])
        self.facts = Facts(
            vocab_size=vocab, limit=limit, executor="scripted", source_limit=source_limit
        )
        self.sources: list[list[int]] = []  # what each row's encoder read
        self.device = torch.device("cpu")
        self.history: list[list[int]] = []  # tokens each row holds: what the engine really fed
        self.passes: list[list[int]] = []  # per pass the tokens each row was fed

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    def _logits(self, context: tuple[int, ...]) -> torch.Tensor:
        return self._script(context) if callable(self._script) else self._script[context[-1]]

    def reserve(self, rows: int, columns: int) -> None:
        """Nothing to do."""

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._grow(max(rows, default=-1) + 1)
        self.history = [self.history[r][:n] for r, n in zip(rows, lengths, strict=True)]
        if self.facts.source_limit is not None:
            self.sources = [self.sources[r] for r in rows]

    def attend(self, sources: Sequence[Sequence[int]]) -> None:
        """Hold the sources of the rows that join."""
        if self.facts.source_limit is None:
            super().attend(sources)
        self.sources.extend(map(list, sources))

    def copy_out(self, row: int, first: int, last: int) -> Columns:
        """A row's tokens are all it holds."""
        return Columns((torch.tensor([self.history[row][first:last]]).unsqueeze(-1),), last - first)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        self._grow(row + 1)
        self.history[row][first:] = columns.states[0].flatten().tolist()

    def _grow(self, rows: int) -> None:
        self.history.extend([] for _ in range(rows - len(self.history)))

    def move(self, row: int, source: int, place: int) -> None:
        self.history[row][place] = self.history[row][source]

    def run(
        self,
        starts: Sequence[int],
        pieces: Sequence[Sequence[int]],
        wanted: Sequence[int],
        parents: Parents = (),
    ) -> torch.Tensor:
        """The scripted logits (NaN where they mean nothing)."""
        self._grow(len(starts))
        self.passes.append([len(piece) for piece in pieces])
        out = torch.full((len(pieces), max(wanted, default=0), self.vocab_size), torch.nan)
        for row, (start, piece, count) in enumerate(zip(starts, pieces, wanted, strict=True)):
            held = self.history[row]
            source = self.sources[row] if self.sources else []
            assert start <= len(held), "fed beyond what the row holds"
            del held[start:]
            paths: list[list[int]] = []
            for place, token in enumerate(piece):
                parent = parents[row][place] if parents and parents[row] else -1
                parent = place - 1 if parent < 0 else parent
                paths.append([*(paths[parent] if parent >= 0 else held), token])
                assert start + place < self.facts.limit, "fed beyond the context"
                if (column := place + count - len(piece)) >= 0:
                    out[row, column] = self._logits((*source, *paths[-1]))
            held += piece
        return out


def engine(
    target: ScriptedModel,
    draft: ScriptedModel | Drafter | None = None,
    eos: Sequence[int] = (),
    max_rows: int = 16,
    tokenizer: Any = None,
) -> Callable[..., Any]:
    """A function `run(prompt | prompts, controller=..., rule=..., **sampling)` over scripts. It
    returns a `Completion` for one prompt (a list of ids) and a list for many; `draft` is a scripted
    model, any drafter, or None for plain decoding."""
    if draft is None:
        draft = NullDrafter()
    drafter = draft if isinstance(draft, Drafter) else ModelDrafter(draft, target.vocab_size)
    made = Engine(target, drafter, tokenizer, frozenset(eos), max_rows)

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
