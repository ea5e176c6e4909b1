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
from typing import Any, NamedTuple

import torch

from forerun.drafters.specbound import temperature
from forerun.engine import Sampling
from forerun.engine.noise import Noise
from forerun.engine.sampling import Sampler
from forerun.errors import SettingError
from forerun.registry import Spec
from forerun.runtime.base import Rows
from forerun.runtime.drafts import spread
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
class OwnText:
    """A prompt and the target's output."""

    prompt: list[int]
    output: list[int]
    sampling: Sampling
    eos: frozenset[int] = frozenset()
    """Tokens that end a draft."""


class Output(NamedTuple):
    """Outputs of the exits after one prefix."""

    tokens: list[int]
    """Per exit layer the token it drafts."""
    sure: FloatArray
    """`(exit layers, anneals)` float32 annealed top-1 probabilities."""


class ExitRound(NamedTuple):
    """One round, and what it runs."""

    work: Work
    drafted: int
    accepted: int
    committed: int


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
    texts: Sequence[OwnText]
    _outputs: dict[tuple[int, int, tuple[int, ...]], Output] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        if self.rows.lengths:
            raise SettingError("the exits need a runtime of their own; this one has rows")
        for first in range(0, len(self.texts), JOINED):
            group = self.texts[first : first + JOINED]
            self.rows.read([t.prompt for t in group], max(len(t.output) for t in group) + 1)

    @property
    def prefixes(self) -> int:
        return len(self._outputs)

    def after(self, text: int, position: int, wrong: tuple[int, ...] = ()) -> Output:
        """Outputs after `position` tokens of a text's output and the tokens `wrong`."""
        key = (text, position, wrong)
        if key not in self._outputs:
            self._outputs[key] = self._run(*key)
        return self._outputs[key]

    @torch.inference_mode()
    def _run(self, text: int, position: int, wrong: tuple[int, ...]) -> Output:
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
        logits = torch.cat(exit_logits)
        whole = spread(logits, self.heads.tokens, self.rows.vocab_size)
        tokens = self._processed(of, context, whole).argmax(-1)
        return Output(tokens.tolist(), self._sure(logits))

    def _processed(self, of: OwnText, context: list[int], logits: torch.Tensor) -> torch.Tensor:
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


def replay(exits: Exits, text: int, setting: Setting) -> Iterator[ExitRound]:
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
        done = _round(exits, text, position, setting, indices, anneal)
        yield done
        position += done.committed


def total(exits: Exits, text: int, setting: Setting) -> Work:
    """The work of all rounds of a text."""
    work = Work()
    for done in replay(exits, text, setting):
        work.update(done.work)
    return work


def _round(
    exits: Exits, text: int, position: int, setting: Setting, indices: list[int], anneal: int
) -> ExitRound:
    """Draft and verify after `position` tokens of the output."""
    of, work = exits.texts[text], Work()
    budget = of.sampling.max_new_tokens - position - 1
    context = exits.rows.limit - 1 - len(of.prompt) - position
    # A text's first round comes without a draft: its pass reads the prompt.
    limit = max(0, min(setting.width, budget, context)) if position else 0
    drafted = accepted = 0
    depths: list[int] = []
    together: int | None = 1
    wrong: tuple[int, ...] = ()
    while drafted < limit:
        at = position + accepted
        outputs = exits.after(text, at, wrong)
        depths.append(0)
        exit_, together = _climb(work, depths, setting, outputs.sure[indices, anneal])
        if exit_ is None:
            break
        token = outputs.tokens[indices[exit_]]
        drafted += 1
        if not wrong and at < len(of.output) and token == of.output[at]:
            accepted += 1
        else:
            wrong = (*wrong, token)
        if token in of.eos:
            break
    layers = layers_of(exits.rows).access.layers
    own = setting.bonus or len(depths) > drafted or not depths
    if depths and (fresh := drafted + own - len(depths)):
        depths, together = [*depths, *[0] * fresh], None
    depths = depths or [0]
    _sweep(work, "verify", depths, 0, layers, together)
    work["project", len(depths)] += 1
    return ExitRound(work, drafted, accepted, accepted + (own or accepted < drafted))


def _climb(
    work: Work, depths: list[int], setting: Setting, sure: FloatArray
) -> tuple[int | None, int | None]:
    """Take the newest token up.

    Returns:
        Which of the setting's exits it takes, None if it is difficult; and as `_sweep`.
    """
    at, together = 0, None
    work["step", 1] += 1
    for number, layer in enumerate(setting.layers):
        together = _sweep(work, "draft", depths, at, layer, together)
        at = layer
        work["exit", 1] += 1
        if sure[number] >= setting.threshold:
            return number, together
    return None, together


def _sweep(
    work: Work, part: str, depths: list[int], first: int, last: int, together: int | None
) -> int | None:
    """Bring all tokens between two depths to `last`, as `LayersExecutor` does.

    `together` is how many tokens are under way together, None at the start; so is the result.
    """
    at = first
    while at < last:
        until = min([last, *(depth for depth in depths if depth > at)])
        if count := depths.count(at):
            work[part, count] += until - at
            if count != together:
                work["gather", 1] += 1
            depths[-count:] = [until] * count
            together = count
        at = until
    return together
