"""SpecBound replayed: a trace with a column per exit.

Whatever the setting, hidden states along a text are those of one plain forward over it, which
gives every exit's token and confidence at every position. A setting chooses among them: what it
drafts from a position is a run of a `Trace`, and its rounds are those of the replay. What is
accepted is exact; a draft goes on behind a wrong token as it would on the text, which is an
estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forerun.costs import Costs
from forerun.drafters.specbound import temperature
from forerun.engine import Sampling
from forerun.engine.sampling import Noise, Sampler
from forerun.errors import SettingError
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Rounds
from forerun.lab.traces.trace import Trace
from forerun.registry import Spec
from forerun.runtime.drafts import spread
from forerun.runtime.heads import ExitHeads
from forerun.runtime.layers import LayerAccess
from forerun.types import BoolArray, FloatArray, IntArray, Stop

ANNEALS = tuple(0.25 * step for step in range(9))  # annealings with a stored confidence
COUNTED = ("layers", "exits", "steps", "rounds")
"""What a replay counts: layers run, exits asked, tokens that climbed, rounds."""


@dataclass(frozen=True, order=True)
class Setting:
    """Settings of specbound; the deepest of `layers` is its depth."""

    layers: tuple[int, ...]
    threshold: float
    anneal: float
    width: int
    bonus: bool = True

    @property
    def controller(self) -> str:
        """One that leaves the length to the drafter's own bound."""
        return f"fixed({self.width + 1})"

    def settings(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "anneal": self.anneal,
            "depth": self.layers[-1],
            "width": self.width,
            "layers": ",".join(map(str, self.layers)),
            **({} if self.bonus else {"bonus": False}),
        }

    def spec(self, exits: str | None = None) -> str:
        """As `--draft` wants it; without `exits`, the heads are the default ones.

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
    eos: frozenset[int] = frozenset()  # tokens that end a draft


@dataclass(frozen=True)
class ExitTrace:
    """What every exit says at every position of some texts."""

    layers: tuple[int, ...]  # exit layers, rising, each with a head
    depth: int  # layers of the model
    texts: Sequence[OwnText]
    tokens: IntArray  # `(texts, T, exits)` the token it drafts; -1 beyond the text
    sure: FloatArray  # `(texts, T, exits, anneals)` annealed top-1 probability

    @classmethod
    def record(cls, heads: ExitHeads, layers: tuple[int, ...], texts: list[OwnText]) -> ExitTrace:
        """Run the model once over every text and ask the heads of `layers`, which rise; sampled
        ones are drawn by the noise of their seed."""
        longest = max(len(text.output) for text in texts)
        tokens = np.full((len(texts), longest, len(layers)), -1)
        sure = np.zeros((*tokens.shape, len(ANNEALS)))
        for row, text in enumerate(texts):
            for column, (ids, confidences) in enumerate(_outputs(heads, layers, text)):
                tokens[row, : len(ids), column] = ids
                sure[row, : len(ids), column] = confidences
        return cls(layers, heads.access.layers, texts, tokens, sure)

    @property
    def positions(self) -> int:
        return sum(len(text.output) for text in self.texts)

    def counts(self, setting: Setting) -> dict[str, IntArray]:
        """`(texts,)` of every one of `COUNTED` when each text is decoded by itself; `SettingError`
        if an exit layer or an annealing was not recorded."""
        try:
            used = [self.layers.index(layer) for layer in setting.layers]
            sure = self.sure[:, :, used, ANNEALS.index(setting.anneal)] >= setting.threshold
        except ValueError as error:
            raise SettingError(f"{setting.spec()} cannot be replayed: {error}") from error
        inside = self.tokens[..., 0] >= 0
        leaves, exit_ = sure.any(-1) & inside, sure.argmax(-1)
        token = np.take_along_axis(self.tokens[..., used], exit_[..., None], 2)[..., 0]
        trace = self._runs(setting, leaves, token)
        width = setting.width
        deep, asked = (
            np.pad(_windows(np.where(inside, values, 0), width).cumsum(-1), [(0, 0)] * 2 + [(1, 0)])
            for values in (np.array(setting.layers)[exit_], exit_ + 1)
        )
        """`(texts, T, width + 1)` of drafts of so many tokens."""
        out = {name: np.zeros(len(self.texts), np.int64) for name in COUNTED}

        def count(rounds: Rounds) -> None:
            at = rounds.prompt, rounds.at
            drafted = at[0], at[1], rounds.drafted
            # One more token climbs, and asks all exits in vain; its way is part of the pass.
            difficult = rounds.stopped_by == Stop.DIFFICULT
            layers = self.depth + deep[drafted]
            if not setting.bonus:  # then what was drafted last is not run from the embedding up
                cut = (rounds.stopped_by >= Stop.EXHAUSTED) & (rounds.drafted > 0)
                last = deep[drafted] - deep[at[0], at[1], np.maximum(rounds.drafted - 1, 0)]
                layers = layers - cut * last
            values = (layers, asked[drafted] + difficult * len(used), rounds.drafted + difficult, 1)
            for name, value in zip(COUNTED, values, strict=True):
                out[name][rounds.prompt] += value

        replay(trace, setting.controller, Costs.synthetic(1), count)
        return out

    def _runs(self, setting: Setting, leaves: BoolArray, token: IntArray) -> Trace:
        """The trace of a setting: where an exit is taken, and what it drafts, `(texts, T)` each."""
        texts, (count, size), width = self.texts, leaves.shape, setting.width
        sizes = np.array([len(text.output) for text in texts])
        output = np.array([[*t.output, *[-2] * (size - len(t.output))] for t in texts])
        on = _windows(leaves, width).cumprod(-1)
        lengths = on.sum(-1)
        matches = (_windows(leaves & (token == output), width).cumprod(-1)).sum(-1)
        stops = np.where(lengths < width, int(Stop.DIFFICULT), int(Stop.EXHAUSTED))
        # A text's first round comes without a draft: its pass reads the prompt.
        lengths[:, 0], stops[:, 0] = 0, int(Stop.EXHAUSTED)
        if not setting.bonus:  # the last of a whole draft is what the pass ends with
            matches = np.where(lengths == width, np.minimum(matches, width - 1), matches)
        eos = np.array(
            [np.isin(row, list(t.eos)) for row, t in zip(token, texts, strict=True)]
        ).reshape(count, size)
        over = (_windows(eos, width) > 0) & (on > 0)
        runs = _windows(token, width)
        return Trace(
            families=("",) * count,
            ids=tuple(map(str, range(count))),
            sizes=sizes,
            budgets=np.array([t.sampling.max_new_tokens for t in texts]),
            prompt_tokens=np.array([len(t.prompt) for t in texts]),
            tokens=output,
            draft_tokens=runs,
            matches=np.minimum(matches, lengths),
            ends=np.where(over.any(-1), over.argmax(-1) + 1, width + 1),
            lengths=lengths,
            stops=stops,
            accept_prob=(np.arange(width) < matches[..., None]).astype(float),
            signals={},
            judged={},
        )


def _windows(values: Any, width: int) -> Any:
    """`(texts, T, width)` of `(texts, T)`: at each position those from there on, then 0."""
    padded = np.pad(values, [(0, 0), (0, width - 1)])
    return np.lib.stride_tricks.sliding_window_view(padded, width, axis=1) * 1


@torch.inference_mode()
def _outputs(
    heads: ExitHeads, layers: tuple[int, ...], text: OwnText
) -> Iterator[tuple[IntArray, FloatArray]]:
    """Per exit its tokens `(n,)` before each of a text's, and `(n, anneals)` confidences."""
    access = heads.access
    vocab = access.model.config.get_text_config(decoder=True).vocab_size
    noise = Noise.of(text.sampling, text.prompt)
    sampler = Sampler([text.sampling], [text.eos], [noise])
    row: Any = SimpleNamespace(context=text.prompt, prompt=len(text.prompt))
    by_layer = _logits(heads, layers, [*text.prompt, *text.output], len(text.output))
    for layer, logits in zip(layers, by_layer, strict=True):
        whole = spread(logits, heads.tokens, vocab)
        tokens = sampler.process(whole.unsqueeze(0), [row], [text.output])[0].argmax(-1)
        heat = torch.tensor([temperature(layer, access.layers, a) for a in ANNEALS])
        divided = logits.float().unsqueeze(1) / heat.to(logits.device).view(1, -1, 1)
        yield tokens.cpu().numpy(), divided.softmax(-1).amax(-1).cpu().numpy()


@torch.inference_mode()
def _logits(
    heads: ExitHeads, layers: Iterable[int], text: Sequence[int], count: int
) -> Iterator[torch.Tensor]:
    """Per layer `(count, n)` logits of its head before each of the last tokens of a text."""
    access = heads.access
    ids = torch.tensor([list(text)[:-1]], device=access.model.device)
    (hidden, at), depth = access.open(ids), 0
    for layer in layers:
        hidden, depth = access.run(hidden, depth, layer, at), layer
        yield heads.logits(layer, hidden[0, -count:])


def view_layers(
    model: Any, text: Sequence[int], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest tokens and their probabilities, in (0, 1], `[layer][position]` both, after each
    layer by the model's own norm and unembedding (the logit lens), at the last `count` positions of
    the text, each before its token is known. The last layer is the model itself.
    `UnsupportedModelError` if layers cannot be run one by one.

    Reference: SpecBound, Figure 1.
    """
    access = LayerAccess(model.eval())
    by_layer = _logits(ExitHeads(access), range(1, access.layers + 1), text, count)
    best = [logits.float().softmax(-1).max(-1) for logits in by_layer]
    return [b.indices.tolist() for b in best], [b.values.tolist() for b in best]
