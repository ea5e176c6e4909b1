"""`generate` of transformers: plain, assisted by a draft model or by early exits, and by beams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from forerun.model import Model

SCHEDULES = ("heuristic", "constant", "dynamic")


class Plain:
    """Greedy decoding. Several prompts are left-padded, sources of an encoder right-padded.

    Only the arguments count: what the checkpoint's generation configuration says is set aside
    while it runs, as in forerun.

    Args:
        first: of the protocol: "context", "eos", "start", "banned".
        target: the module.
        draft: that of the draft model, if any.
    """

    rows: int | None = None

    def __init__(self, first: Mapping[str, Any], target: Any, draft: Any = None) -> None:
        self._hf, self._draft = target, draft
        self._eos, self._limit, self._banned = first["eos"], first["context"], first["banned"]
        self._start = first["start"] or []
        self._encodes = first["start"] is not None

    def versions(self) -> dict[str, str]:
        """Of the libraries."""
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int, penalty: float = 1.0
    ) -> list[list[int]]:
        """Continue prompts in one batch; `most` less where the context ends before."""
        return self._generate(prompts, most, penalty)

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        penalty: float,
        *,
        own: Any = None,
        early_exit: int | None = None,
        beams: int = 1,
    ) -> list[list[int]]:
        """`own` is the generation configuration the target has meanwhile."""
        ids, mask = self._padded(prompts)
        begin = len(self._start) if self._encodes else ids.shape[1]
        config = _config(
            max_new_tokens=min(most, self._limit - begin),
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
            out = self._hf.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                assistant_model=self._draft,
                **more,
            )
        return [self._trim(row) for row in out[:, begin:].tolist()]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask `(prompts, longest)`."""
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


class Beam(Plain):
    """Beam search, the usual baseline of translation; other texts than greedy ones.

    Args:
        beams: ≥ 2.
    """

    def __init__(self, first: Mapping[str, Any], target: Any, beams: int = 5) -> None:
        super().__init__(first, target)
        _require(beams >= 2, f"beams must be ≥ 2, got {beams}")
        self._beams = beams

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int, penalty: float = 1.0
    ) -> list[list[int]]:
        """Continue prompts in one batch."""
        return self._generate(prompts, most, penalty, beams=self._beams)


class Assisted(Plain):
    """`generate(assistant_model=draft)`, one prompt after another.

    Args:
        schedule: of the tokens drafted per round. ``"heuristic"``: +2 when all were accepted, else
            −1, kept over calls. ``"constant"``: always `tokens`. ``"dynamic"``: `tokens` at most,
            with a threshold that adapts, for which transformers needs scikit-learn.
        tokens: drafted per round, to begin with, ≥ 1 (20 in transformers).
        threshold: draft on while its top probability is at least this, in [0, 1]; 0 is off. None
            is 0.4 (as in transformers) for ``"dynamic"`` and otherwise off. With scikit-learn
            installed any other than 0 adapts.
    """

    rows = 1

    def __init__(
        self,
        first: Mapping[str, Any],
        target: Any,
        draft: Any,
        schedule: str = "constant",
        tokens: int = 20,
        threshold: float | None = None,
    ) -> None:
        super().__init__(first, target, draft)
        _require(schedule in SCHEDULES, f"schedule must be one of {SCHEDULES}, got {schedule!r}")
        _require(tokens >= 1, f"tokens must be ≥ 1, got {tokens}")
        if threshold is None:
            threshold = 0.4 if schedule == "dynamic" else 0.0
        _require(0 <= threshold <= 1, f"threshold must be in [0, 1], got {threshold}")
        _require(draft is not None, "the drafter is not a model of transformers")
        sizes = [m.config.get_text_config().vocab_size for m in (target, draft)]
        _require(sizes[0] == sizes[1], f"transformers wants vocabularies of one size, got {sizes}")
        if schedule == "dynamic":
            wanted = "scikit-learn is not installed, without which the threshold never adapts"
            _require(find_spec("sklearn") is not None, wanted)
        self._settings = _drafting(schedule, tokens, threshold)

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int, penalty: float = 1.0
    ) -> list[list[int]]:
        """Continue one prompt after another."""
        # transformers reads these from the assistant, and nowhere else.
        with _configured(self._draft, self._settings):
            return [self._generate([prompt], most, penalty)[0] for prompt in prompts]


class EarlyExit(Plain):
    """`generate(assistant_early_exit=layer)`: the first layers draft, one prompt after another.

    Args:
        layer: layers that draft, in [1, layers of the target).
        tokens: drafted per round, ≥ 1.
    """

    rows = 1

    def __init__(self, first: Mapping[str, Any], target: Any, layer: int, tokens: int = 5) -> None:
        super().__init__(first, target)
        depth = target.config.num_hidden_layers
        _require(1 <= layer < depth, f"layer must be in [1, {depth - 1}], got {layer}")
        _require(tokens >= 1, f"tokens must be ≥ 1, got {tokens}")
        self._layer, self._settings = layer, _drafting("constant", tokens, 0.0)

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int, penalty: float = 1.0
    ) -> list[list[int]]:
        """Continue one prompt after another."""
        config = self._hf.config
        depth = config.num_hidden_layers
        # The target itself is the assistant, so its settings are read from the target.
        how = {"own": self._settings, "early_exit": self._layer}
        try:
            return [self._generate([prompt], most, penalty, **how)[0] for prompt in prompts]
        finally:
            config.num_hidden_layers = depth  # an interrupted draft leaves its own behind


def make(name: str, first: Mapping[str, Any]) -> Plain:
    """The peer of a name, its models loaded."""
    torch.set_num_threads(first["threads"])
    target = _loaded(first, first["model"])
    if name == "transformers-beam":
        return Beam(first, target, first["beams"])
    if name == "transformers-early-exit":
        return EarlyExit(first, target, first["layer"], first["tokens"])
    if name == "transformers-assisted":
        draft = None if first["draft"] is None else _loaded(first, first["draft"])
        return Assisted(
            first, target, draft, first["schedule"], first["tokens"], first["threshold"]
        )
    return Plain(first, target)


def _loaded(first: Mapping[str, Any], name: str) -> Any:
    import transformers

    if Path(name, "model.int8.safetensors").is_file():  # a form of forerun's own
        from forerun.runtime.load import load_model

        return load_model(name, first["device"], first["dtype"])
    encodes = first["start"] is not None
    kind = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    dtype = first["dtype"] if first["dtype"] == "auto" else getattr(torch, first["dtype"])
    return kind.from_pretrained(name, dtype=dtype).to(first["device"]).eval()


def beside(make: Callable[..., Plain], model: Model, *settings: Any) -> Plain:
    """A peer in this process, on the weights of a model of forerun that is loaded already."""
    from forerun.drafters.model import ModelDrafter
    from forerun.lab.bench.peers import opening

    modules = [_module(model.target)]
    if make is Assisted:
        drafter = model.drafter
        modules.append(_module(drafter.rows) if isinstance(drafter, ModelDrafter) else None)
    return make(opening(model, "", None), *modules, *settings)


def _module(rows: Any) -> Any:
    """The module behind rows as its users have it: a copy if it is packed, and of an executor that
    has dropped its torch weights, loaded again."""
    facts = rows.facts
    if facts.executor == "openvino" and facts.precision == "float32" and facts.name:
        return _again(facts.name)
    module = rows.executor.module()
    _require(hasattr(module, "generate"), "the target is not a transformers model")
    return _unpacked(module)


@cache
def _again(name: str) -> Any:
    from forerun.runtime import load_model

    return load_model(name, "cpu", "fp32")


@cache
def _unpacked(module: Any) -> Any:
    from forerun.runtime.packing import unpacked

    return unpacked(module)


def _require(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


def _config(**settings: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**settings)


def _drafting(schedule: str, tokens: int, threshold: float) -> Any:
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
