"""Other implementations of the same decoding, on the same weights: for `audit` and `bench`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from forerun.drafters.model import ModelDrafter
from forerun.errors import require
from forerun.model import Model
from forerun.runtime import Rows, load_model
from forerun.runtime.packing import unpacked

Schedule = Literal["heuristic", "constant", "dynamic"]
SCHEDULES: tuple[Schedule, ...] = ("heuristic", "constant", "dynamic")


@dataclass(frozen=True)
class PeerOutput:
    """What a peer wrote."""

    tokens: list[list[int]]
    """New tokens per prompt, an end of text included."""
    seconds: float
    """Wall time of all prompts together, prefill included."""


class Peer(ABC):
    """Somebody else's greedy decoding."""

    name: str
    """Tells peers and their settings apart, e.g. ``"transformers-assisted(constant,tokens=5)"``."""
    plain: str | None = None
    """Name of the peer that decodes plainly what this one speculates on."""

    @abstractmethod
    def available(self) -> str | None:
        """None if it can run here, or the reason why not."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> PeerOutput:
        """Continue prompts (token ids) greedily, each until an end of text or the limit.

        Args:
            prompts: decoded together where the peer can do that.
            max_new_tokens: ≥ 1.
            repetition_penalty: > 0; 1 is off.
        """


class TransformersPlain(Peer):
    """`generate` of transformers, on the target's own module. Several prompts are left-padded.

    Only the arguments count: what the checkpoint's generation configuration says is set aside
    while it runs, as in forerun.
    """

    name = "transformers"

    def __init__(self, model: Model) -> None:
        self._hf = _module(model.target)
        self._eos = sorted(model.eos)
        self._limit = model.target.limit
        self._encodes = model.target.facts.source_limit is not None
        self._start = list(model.opening.prompt)
        self._banned = sorted(getattr(model.target.executor, "banned", ()))

    def available(self) -> str | None:
        """Any target that is a transformers model will do."""
        return None if hasattr(self._hf, "generate") else "the target is not a transformers model"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> PeerOutput:
        """All prompts in one batch; `max_new_tokens` less where the context ends before."""
        return self._generate(prompts, max_new_tokens, repetition_penalty)

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        budget: int,
        penalty: float,
        *,
        own: Any = None,
        draft: Any = None,
        early_exit: int | None = None,
        beams: int = 1,
    ) -> PeerOutput:
        """`own` is the generation configuration the target has meanwhile."""
        ids, mask = self._padded(prompts)
        begin = len(self._start) if self._encodes else ids.shape[1]
        config = _config(
            max_new_tokens=min(budget, self._limit - begin),
            do_sample=False,
            num_beams=beams,
            repetition_penalty=penalty,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
            suppress_tokens=self._banned or None,
            decoder_start_token_id=self._start[0] if self._encodes else None,
            assistant_early_exit=early_exit,
        )
        more = {}
        if self._encodes:
            more["decoder_input_ids"] = torch.tensor([self._start] * len(ids), device=ids.device)
        with _quiet(), _configured(self._hf, own or _config()):
            began = time.perf_counter()
            out = self._hf.generate(
                ids, attention_mask=mask, generation_config=config, assistant_model=draft, **more
            )
            rows = out[:, begin:].tolist()
            seconds = time.perf_counter() - began
        return PeerOutput([self._trim(row) for row in rows], seconds)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask `(prompts, longest)`: prompts padded on the left, sources on the right."""
        longest, filler = max(map(len, prompts)), 0
        if self._encodes:  # some encoders tell padding by its id
            filler = self._hf.config.pad_token_id or 0
        ids, mask = [], []
        for prompt in prompts:
            pad, ones = [filler] * (longest - len(prompt)), [1] * len(prompt)
            none = [0] * len(pad)
            ids.append([*prompt, *pad] if self._encodes else [*pad, *prompt])
            mask.append([*ones, *none] if self._encodes else [*none, *ones])
        device = self._hf.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _trim(self, tokens: list[int]) -> list[int]:
        """Without the padding behind an end of text."""
        ends = [i for i, token in enumerate(tokens) if token in self._eos]
        return tokens[: ends[0] + 1] if ends else tokens


class TransformersBeam(TransformersPlain):
    """Beam search of transformers, the usual baseline of translation; other texts than greedy ones.

    Args:
        model: the target; its drafter does not matter.
        beams: ≥ 2.
    """

    def __init__(self, model: Model, beams: int = 5) -> None:
        super().__init__(model)
        require(beams >= 2, "beams", beams, "≥ 2")
        self._beams = beams
        self.name = f"transformers-beam({beams})"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> PeerOutput:
        """All prompts in one batch."""
        return self._generate(prompts, max_new_tokens, repetition_penalty, beams=self._beams)


class _OneByOne(TransformersPlain):
    """Assisted generation takes one prompt at a time."""

    plain = TransformersPlain.name

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> PeerOutput:
        """One prompt after another: transformers assists batches of one only."""
        done = [self._one(p, max_new_tokens, repetition_penalty) for p in prompts]
        return PeerOutput([o.tokens[0] for o in done], sum(o.seconds for o in done))

    def _one(self, prompt: Sequence[int], budget: int, penalty: float) -> PeerOutput:
        raise NotImplementedError


class TransformersAssisted(_OneByOne):
    """`generate(assistant_model=draft)` of transformers.

    Args:
        model: target and draft model.
        schedule: of the tokens drafted per round. ``"heuristic"``: +2 when all were accepted, else
            −1, kept over calls. ``"constant"``: always `tokens`. ``"dynamic"``: `tokens` at most,
            with a threshold that adapts, for which transformers needs scikit-learn.
        tokens: drafted per round, to begin with, ≥ 1 (20 in transformers).
        threshold: draft on while its top probability is at least this, in [0, 1]; 0 is off. None
            is 0.4 (as in transformers) for ``"dynamic"`` and otherwise off. With scikit-learn
            installed any other than 0 adapts.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule = "constant",
        tokens: int = 20,
        threshold: float | None = None,
    ) -> None:
        super().__init__(model)
        require(schedule in SCHEDULES, "schedule", schedule, " or ".join(SCHEDULES))
        require(tokens >= 1, "tokens", tokens, "≥ 1")
        if threshold is None:
            threshold = 0.4 if schedule == "dynamic" else 0.0
        require(0 <= threshold <= 1, "threshold", threshold, "in [0, 1]")
        self._schedule = schedule
        rows = model.drafter.rows if isinstance(model.drafter, ModelDrafter) else None
        self._draft = None if rows is None else _module(rows)
        self._settings = _drafting(schedule, tokens, threshold)
        stop = f",threshold={threshold:g}" if threshold else ""
        self.name = f"transformers-assisted({schedule},tokens={tokens}{stop})"

    def available(self) -> str | None:
        """It needs a draft model with logits as wide as the target's."""
        reason = super().available()
        if reason is not None:
            return reason
        if self._draft is None:
            return "the drafter is not a model of transformers"
        sizes = [m.config.get_text_config().vocab_size for m in (self._hf, self._draft)]
        if sizes[0] != sizes[1]:
            return f"transformers wants vocabularies of one size, these have {sizes[0]}, {sizes[1]}"
        if self._schedule == "dynamic" and find_spec("sklearn") is None:
            return "scikit-learn is not installed, without which the threshold never adapts"
        return None

    def _one(self, prompt: Sequence[int], budget: int, penalty: float) -> PeerOutput:
        # transformers reads these from the assistant, and nowhere else.
        with _configured(self._draft, self._settings):
            return self._generate([prompt], budget, penalty, draft=self._draft)


class TransformersEarlyExit(_OneByOne):
    """`generate(assistant_early_exit=layer)` of transformers: the first layers draft.

    Args:
        model: the target; its drafter does not matter.
        layer: layers that draft, in [1, layers of the target).
        tokens: drafted per round, ≥ 1.
    """

    def __init__(self, model: Model, layer: int, tokens: int = 5) -> None:
        super().__init__(model)
        require(layer >= 1, "layer", layer, "≥ 1")
        require(tokens >= 1, "tokens", tokens, "≥ 1")
        self._layer, self._settings = layer, _drafting("constant", tokens, 0.0)
        self.name = f"transformers-early-exit({layer},tokens={tokens})"

    def available(self) -> str | None:
        """It needs a target deeper than the exit."""
        reason = super().available()
        if reason is not None:
            return reason
        depth = self._hf.config.num_hidden_layers
        return None if self._layer < depth else f"the target has {depth} layers only"

    def _one(self, prompt: Sequence[int], budget: int, penalty: float) -> PeerOutput:
        config = self._hf.config
        depth = config.num_hidden_layers
        try:
            # Here the target itself is the assistant, so its settings are read from the target.
            return self._generate(
                [prompt], budget, penalty, own=self._settings, early_exit=self._layer
            )
        finally:
            config.num_hidden_layers = depth  # an interrupted draft leaves its own behind


def transformers_peers(model: Model) -> list[Peer]:
    """What an audit compares: plain, and assisted with a fixed and a varying length."""
    return [
        TransformersPlain(model),
        TransformersAssisted(model, "constant", 5),
        TransformersAssisted(model, "heuristic", 5),
    ]


def _module(rows: Rows) -> Any:
    """The module behind rows as its users have it: a copy if it is packed, and of an executor that
    has dropped its torch weights, loaded again."""
    if rows.facts.executor == "openvino" and rows.facts.precision == "float32" and rows.facts.name:
        return _loaded(rows.facts.name)
    module = rows.executor.module()
    return None if module is None else _unpacked(module)


_unpacked = cache(unpacked)


@cache
def _loaded(name: str) -> Any:
    return load_model(name, "cpu", "fp32")


def _config(**settings: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**settings)


def _drafting(schedule: Schedule, tokens: int, threshold: float) -> Any:
    return _config(
        num_assistant_tokens=tokens,
        num_assistant_tokens_schedule="heuristic" if schedule == "heuristic" else "constant",
        assistant_confidence_threshold=threshold,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Its assisted generation warns about how it calls itself."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _configured(hf: Any, config: Any) -> Iterator[None]:
    """Another generation configuration on a model, for a while."""
    own, hf.generation_config = hf.generation_config, config
    try:
        yield
    finally:
        hf.generation_config = own
