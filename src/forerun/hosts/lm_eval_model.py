"""A `forerun.Model` as lm-evaluation-harness drives models, for runtimes other than PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from forerun.engine import Completion
from forerun.errors import GenerationError
from forerun.model import Model
from forerun.requests import Sampling

DRAWN = ("temperature", "top_p", "top_k", "min_p")


class HarnessModel(HFLM):
    """lm-eval's own, but for the model: texts are written speculatively, given ones are scored one
    at a time in plain passes."""

    def __init__(
        self,
        model: Model,
        wrote: Callable[[Sequence[Completion], float], None],
        settings: Mapping[str, Any],
    ) -> None:
        self._engine, self._wrote, self._settings = model, wrote, settings
        shell = SimpleNamespace(device=torch.device("cpu"), config=PreTrainedConfig())
        super().__init__(
            pretrained=shell, backend="causal", tokenizer=model.tokenizer,
            max_length=model.target.limit, batch_size=settings["batch_size"],
        )  # fmt: skip

    def _loglikelihood_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return super()._loglikelihood_tokens(*args, **kwargs | {"override_bs": 1})

    def _model_call(self, inps: torch.Tensor, **_: Any) -> torch.Tensor:
        rows, texts = self._engine.target, inps.tolist()
        try:
            rows.read([text[:1] for text in texts], inps.shape[1])
            return rows.feed(texts)
        finally:
            rows.keep([])

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: Sequence[str],
        attention_mask: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        kept = zip(context, attention_mask.bool(), strict=True)
        prompts = [row[inside].tolist() for row, inside in kept]
        drawn = {name: how[name] for name in DRAWN if name in how and how.get("do_sample")}
        most, began = max_length - context.shape[1], time.perf_counter()
        sampling = Sampling(**drawn, max_new_tokens=most, stop=tuple(stop))
        done = self._engine.generate(prompts, sampling=sampling, **self._settings)
        self._wrote(done, began)
        for completion in done:
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        rows = zip(context.tolist(), done, strict=True)
        texts = [torch.tensor([*before, *completion.tokens]) for before, completion in rows]
        return pad_sequence(texts, batch_first=True, padding_value=self.tokenizer.pad_token_id)
