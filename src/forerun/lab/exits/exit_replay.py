"""SpecBound replayed: its exits along a model's own texts, run once for all settings.

Whatever the setting, the text is the target's and the hidden states of a prefix are those of a
plain forward. So the exits are run once per prefix, at all exit layers together, and
their outputs kept; rounds are then counted without running the model. Off the text, where a draft
went wrong, the same holds: the few paths that settings take there are run when first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from forerun.drafters.specbound import temperature
from forerun.engine import Sampling
from forerun.engine.noise import Noise
from forerun.engine.sampling import Sampler
from forerun.errors import SettingError
from forerun.registry import Spec
from forerun.runtime.base import Rows
from forerun.runtime.exits import Work, layers_of
from forerun.runtime.layers import ExitHeads
from forerun.types import FloatArray

ANNEALS = tuple(0.25 * step for step in range(9))
"""Annealings that can be replayed: a confidence is stored for each."""
JOINED = 16
"""Prompts read per pass."""


@dataclass(frozen=True, order=True)
class Setting:
    """Settings of specbound; the deepest of `layers` is its depth."""

    layers: tuple[int, ...]
    threshold: float
    anneal: float
    width: int
    bonus: bool = True

    @property
    def depth(self) -> int:
        """The deepest layer a draft may reach."""
        return self.layers[-1]

    @property
    def controller(self) -> str:
        """One that leaves the length to the drafter's own bound."""
        return f"fixed({self.width + 1})"

    def settings(self) -> dict[str, Any]:
        """The drafter's settings by name."""
        return {
            "threshold": self.threshold,
            "anneal": self.anneal,
            "depth": self.depth,
            "width": self.width,
            "layers": ",".join(map(str, self.layers)),
            **({} if self.bonus else {"bonus": False}),
        }

    def spec(self, exits: str | None = None) -> str:
        """As `--draft` wants it; without `exits`, the heads are those of `--exits`.

        >>> Setting((2, 6), 0.7, 0.5, 4).spec()
        "specbound(threshold=0.7,anneal=0.5,depth=6,width=4,layers='2,6')"
        """
        heads = {} if exits is None else {"exits": exits}
        return str(Spec("specbound", (), self.settings() | heads))


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output."""

    prompt: list[int]
    output: list[int]
    sampling: Sampling
    eos: frozenset[int] = frozenset()
    """Tokens that end a draft."""


@dataclass(frozen=True)
class Output:
    """Outputs of the exits after one prefix."""

    tokens: list[int]
    """Per exit layer the token it drafts."""
    sure: FloatArray
    """`(exit layers, anneals)` float32 annealed top-1 probabilities."""


@dataclass
class Counts:
    """Work of one or more rounds. Lists are indexed by positions at once, from 0 on."""

    draft_calls: list[int]
    """Layers run while drafting."""
    verify_calls: list[int]
    """Layers run while verifying."""
    verified: list[int]
    """Rounds by the positions that were verified: drafted tokens, and mostly one more."""
    exits: int = 0
    """Exit heads run."""
    gathers: int = 0
    """Batches put together for some layers."""
    steps: int = 0
    """Tokens that climbed: drafted ones and difficult ones."""
    drafted: int = 0
    accepted: int = 0
    committed: int = 0

    @classmethod
    def none(cls, width: int) -> Counts:
        """No work, for drafts of at most `width` tokens."""
        empty = [0] * (width + 2)
        return cls(empty[:], empty[:], empty[:])

    @property
    def rounds(self) -> int:
        return sum(self.verified)

    def work(self) -> Work:
        """The same as a `LayersExecutor` counts it."""

        def passes(calls: list[int]) -> int:
            return sum(width * count for width, count in enumerate(calls))

        return Work(
            draft_passes=passes(self.draft_calls),
            verify_passes=passes(self.verify_calls),
            draft_calls=sum(self.draft_calls),
            verify_calls=sum(self.verify_calls),
            exit_projections=self.exits,
            projections=passes(self.verified),
        )

    def __add__(self, other: Counts) -> Counts:
        def added(mine: list[int], theirs: list[int]) -> list[int]:
            longer, shorter = sorted((mine, theirs), key=len, reverse=True)
            return [n + (shorter[i] if i < len(shorter) else 0) for i, n in enumerate(longer)]

        return Counts(
            added(self.draft_calls, other.draft_calls),
            added(self.verify_calls, other.verify_calls),
            added(self.verified, other.verified),
            self.exits + other.exits,
            self.gathers + other.gathers,
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.committed + other.committed,
        )


@dataclass
class Exits:
    """Outputs of every exit after every prefix that a setting reaches, computed when needed.

    Texts that were sampled were drawn by the noise of their seed (rule `gumbel`); so are drafts.

    Args:
        rows: a runtime of its own for this (its rows are the texts, from now on).
        heads: from shallow hidden states to logits.
        layers: exit layers, rising, each with a head.
        texts: the target's outputs; of sampled ones with their seed.

    Raises:
        SettingError: the runtime is in use.
    """

    rows: Rows
    heads: ExitHeads
    layers: tuple[int, ...]
    texts: Sequence[Text]
    prefixes: int = field(default=0, init=False)
    """Prefixes that were run."""
    _memo: dict[tuple[int, int, tuple[int, ...]], Output] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.rows.lengths:
            raise SettingError("the exits need a runtime of their own; this one has rows")
        for first in range(0, len(self.texts), JOINED):
            group = self.texts[first : first + JOINED]
            self.rows.read([t.prompt for t in group], max(len(t.output) for t in group) + 1)

    def after(self, text: int, position: int, wrong: tuple[int, ...] = ()) -> Output:
        """Outputs after `position` tokens of a text's output and the tokens `wrong`."""
        key = (text, position, wrong)
        outputs = self._memo.get(key)
        if outputs is None:
            outputs = self._memo[key] = self._ask(*key)
        return outputs

    @torch.inference_mode()
    def _ask(self, text: int, position: int, wrong: tuple[int, ...]) -> Output:
        """Take one token up through all exit layers; earlier ones mostly stand there already."""
        of = self.texts[text]
        context = [*of.prompt, *of.output[:position], *wrong]
        contexts: list[Sequence[int] | None] = [None] * len(self.texts)
        contexts[text] = context
        exit_logits: list[torch.Tensor] = []

        def stay(layer: int, rows: list[int], hidden: torch.Tensor) -> list[bool]:
            exit_logits.append(self.heads.logits(layer, hidden))
            return [False]

        layers_of(self.rows).climb(self.rows.lengths, contexts, self.layers, stay)
        self.prefixes += 1
        logits = torch.cat(exit_logits)
        tokens = self._processed(of, context, self._spread(logits)).argmax(-1)
        return Output(tokens.tolist(), self._sure(logits))

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """`(n, V)` logits: −inf for tokens outside the heads' vocabulary."""
        if self.heads.tokens is None:
            return logits
        full = logits.new_full((len(logits), self.rows.vocab_size), -torch.inf)
        full[:, self.heads.tokens] = logits
        return full

    def _processed(self, of: Text, context: list[int], logits: torch.Tensor) -> torch.Tensor:
        """`(n, V)` logits as the engine processes them for the token after `context`."""
        count = len(logits)
        noises = [Noise.of(of.sampling, of.prompt)] * count
        sampler = Sampler([of.sampling] * count, [of.eos] * count, noises)
        if sampler.trivial:
            return logits
        row = SimpleNamespace(context=context, prompt=len(of.prompt))
        return sampler.process(logits.unsqueeze(1), [row] * count, [[]] * count)[:, 0]

    def _sure(self, logits: torch.Tensor) -> FloatArray:
        """`(exit layers, anneals)`, computed as the drafter does."""
        total = layers_of(self.rows).access.layers
        columns = []
        for anneal in ANNEALS:
            heat = [temperature(layer, total, anneal) for layer in self.layers]
            divided = logits.float() / torch.tensor(heat, device=logits.device).unsqueeze(1)
            columns.append(divided.softmax(-1).amax(-1))
        sure: FloatArray = torch.stack(columns, 1).cpu().numpy()
        return sure


def replay(exits: Exits, text: int, setting: Setting) -> Iterator[Counts]:
    """Round after round of decoding a text with a setting and its controller, on its own.

    Raises:
        SettingError: an exit layer or an annealing that was not recorded.
    """
    try:
        indices = [exits.layers.index(layer) for layer in setting.layers]
        anneal = ANNEALS.index(setting.anneal)
    except ValueError as error:
        raise SettingError(f"{setting.spec()} cannot be replayed: {error}") from error
    position, end = 0, len(exits.texts[text].output)
    while position < end:
        counts = _round(exits, text, position, setting, indices, anneal)
        yield counts
        position += counts.committed


def total(exits: Exits, text: int, setting: Setting) -> Counts:
    """All rounds of a text together."""
    return sum(replay(exits, text, setting), Counts.none(setting.width))


def _round(
    exits: Exits, text: int, position: int, setting: Setting, indices: list[int], anneal: int
) -> Counts:
    """Draft and verify after `position` tokens of the output."""
    of, counts = exits.texts[text], Counts.none(setting.width)
    budget = of.sampling.max_new_tokens - position - 1
    context = exits.rows.limit - 1 - len(of.prompt) - position
    # A text's first round comes without a draft: its pass reads the prompt.
    limit = max(0, min(setting.width, budget, context)) if position else 0
    depths: list[int] = []
    wrong: tuple[int, ...] = ()
    while counts.drafted < limit:
        at = position + counts.accepted
        outputs = exits.after(text, at, wrong)
        depths.append(0)
        counts.steps += 1
        exit_ = _climb(counts, depths, setting, outputs.sure[indices, anneal])
        if exit_ is None:
            break
        token = outputs.tokens[indices[exit_]]
        counts.drafted += 1
        if not wrong and at < len(of.output) and token == of.output[at]:
            counts.accepted += 1
        else:
            wrong = (*wrong, token)
        if token in of.eos:
            break
    layers = layers_of(exits.rows).access.layers
    span = None if depths else 1
    own = setting.bonus or len(depths) > counts.drafted or not depths
    depths += [0] * (counts.drafted + own - len(depths))
    _sweep(counts, counts.verify_calls, depths, 0, layers, span)
    counts.verified[len(depths)] += 1
    counts.committed = counts.accepted + (own or counts.accepted < counts.drafted)
    return counts


def _climb(counts: Counts, depths: list[int], setting: Setting, sure: FloatArray) -> int | None:
    """Take the newest token up; which of the setting's exits it takes, None if it is difficult."""
    at, span = 0, None
    for number, layer in enumerate(setting.layers):
        span = _sweep(counts, counts.draft_calls, depths, at, layer, span)
        at = layer
        counts.exits += 1
        if sure[number] >= setting.threshold:
            return number
    return None


def _sweep(
    counts: Counts, calls: list[int], depths: list[int], first: int, last: int, span: int | None
) -> int | None:
    """Bring all tokens between two depths to `last`, as `LayersExecutor` does; counts into `calls`.

    `span` is how many tokens are under way together, None at the start; so is the result.
    """
    at = first
    while at < last:
        until = min([last, *(depth for depth in depths if depth > at)])
        if count := depths.count(at):
            calls[count] += until - at
            counts.gathers += count != span
            depths[-count:] = [until] * count
            span = count
        at = until
    return span
