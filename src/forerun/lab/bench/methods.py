"""Groups of prompts, and the methods of a bench that continue them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from forerun.errors import PromptError

if TYPE_CHECKING:
    from forerun.engine import Completion
    from forerun.model import Model
    from forerun.prompts import Prompt

PLAIN = "plain"  # the name of decoding with the target alone

Kind = Literal["plain", "forerun", "peer"]


@dataclass(frozen=True)
class Group:
    """Prompts of one family that are decoded together."""

    batch: int
    family: str
    prompts: tuple[Prompt, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the group in another run."""
        return (self.batch, self.family, *(p.id for p in self.prompts))


@dataclass(frozen=True)
class Run:
    """One timed run of one method on one group; lists are per prompt."""

    seconds: float  # wall time of the whole group, prefill included
    tokens: list[list[int]]  # output token ids
    ttft: list[float] | None = None  # seconds to the first token; None if the method cannot tell
    rounds: list[int] | None = None
    drafted: list[int] | None = None
    accepted: list[int] | None = None
    lengths: dict[int, int] | None = None  # rounds of the group by the drafted tokens they kept


@dataclass(frozen=True)
class Ours:
    """Our engine with one controller and one rule, or decoding plainly."""

    name: str
    model: Model
    controller: Any = None  # None is plain decoding: the target alone, through the same engine
    rule: Any = "gumbel"
    sampled: bool = False  # whether prompts are sampled, not decoded greedily

    largest_batch: int | None = field(default=None, init=False)  # there is no limit

    @property
    def kind(self) -> Kind:
        """Plain decoding, one of ours, or a peer."""
        return "plain" if self.controller is None else "forerun"

    @property
    def certain(self) -> bool:
        """Whether it tosses no coins, so that its texts can be compared with plain decoding's."""
        from forerun.rules import RULES

        plain = self.controller is None
        return plain or not self.sampled or RULES.make(self.rule).gumbel_max

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Continue these prompts together, timed."""
        plain = self.controller is None
        began = time.perf_counter()
        done: list[Completion] = self.model.generate(
            [p.ids for p in prompts],
            controller="fixed(0)" if plain else self.controller,
            rule=None if plain else self.rule,
            sampling=[p.sampling for p in prompts],
            batch_size=len(prompts),
            plain=plain,
        )
        seconds = time.perf_counter() - began
        lengths = Counter(r.accepted for c in done for r in c.rounds)
        names = "first_token_seconds", "rounds", "drafted", "accepted"
        ttft, rounds, drafted, accepted = ([getattr(c.stats, n) for c in done] for n in names)
        tokens, kept = [c.tokens for c in done], dict(sorted(lengths.items()))
        return Run(seconds, tokens, ttft, rounds, drafted, accepted, kept)

    def about(self) -> dict[str, Any]:
        """Name, kind and settings, for the results."""
        from forerun.controllers import CONTROLLERS
        from forerun.rules import RULES

        out: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.controller is not None:
            rule = RULES.make(self.rule)
            out["controller"] = CONTROLLERS.text(CONTROLLERS.make(self.controller))
            out |= {"rule": RULES.text(rule), "lossless": rule.lossless}
        return out


def groups(prompts: Sequence[Prompt], batches: Sequence[int]) -> list[Group]:
    """The prompts of each family in batches of each size, families in turns; `PromptError` if a
    family has fewer than a batch."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(str(prompt.family), []).append(prompt)
    out = []
    for batch in batches:
        for family, own in families.items():
            if len(own) < batch:
                raise PromptError(
                    f"{len(own)} prompts of {family} do not fill a batch of {batch}; "
                    f"give at least {batch} per family (`prompts`), or a smaller `batch`"
                )
        most = max(len(own) for own in families.values()) // batch
        for turn in range(most):  # what does not fill a batch is left out
            for family, own in families.items():
                part = tuple(own[turn * batch : (turn + 1) * batch])
                if len(part) == batch:
                    out.append(Group(batch, family, part))
    return out
