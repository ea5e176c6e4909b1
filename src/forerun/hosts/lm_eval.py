"""lm-evaluation-harness over models that speculate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from forerun.engine import Sampling
from forerun.engine.results import Completion, Round, Stats
from forerun.errors import ForerunWarning, GenerationError, SettingError, optional
from forerun.hosts.speculative import attach
from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, load
from forerun.rules import RULES
from forerun.runtime.load import load_model, load_tokenizer

REPORTED = (
    "tokens", "acceptance_rate", "block_efficiency", "tokens_per_second", "drift_mean", "drift_max"
)  # fmt: skip
"""Statistics over all texts that were written; rates are None if there are none."""
DRAWN = "temperature", "top_p", "top_k", "min_p"
Newest = Callable[[], Sequence[Completion]]
"""The texts that were written last."""


@dataclass(frozen=True)
class Evaluated:
    """A model that speculates, as it is to be evaluated: target and draft by name, specs.

    On the runtime "torch" it is lm-eval's own `HFLM` over the attached model, on any other a
    `forerun.Model`.
    """

    target: str
    draft: str
    controller: str = DEFAULT_CONTROLLER
    rule: str = DEFAULT_RULE
    runtime: str = "torch"
    dtype: str | None = None
    batch_size: int = 16


def evaluate(
    model: Evaluated,
    tasks: Sequence[str],
    limit: int | None = None,
    include_path: str | None = None,
) -> dict[str, Any]:
    """Results of lm-eval, with what speculation did under "forerun".

    Args:
        model: to be evaluated.
        tasks: by lm-eval's names, or those of `include_path`.
        limit: documents of each task; None takes all.
        include_path: a folder of further tasks.

    Raises:
        MissingExtraError: lm-eval is not installed.
        SettingError: an unknown task.

    Warns:
        ForerunWarning: a lossy rule, and tasks that score given texts, which no rule judges.
    """
    harness = optional("lm_eval", "lm-eval")
    manager = optional("lm_eval.tasks", "lm-eval").TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise SettingError(f"lm-eval has no task {', '.join(unknown)}; see `lm-eval ls tasks`")
    lossless, seconds, texts, rounds = RULES.make(model.rule).lossless, 0.0, 0, list[Round]()

    made, newest = _harnessed(model)
    generate = made._model_generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal seconds, texts
        began = time.perf_counter()
        out = generate(*args, **kwargs)
        seconds, texts = seconds + time.perf_counter() - began, texts + len(newest())
        rounds.extend(r for completion in newest() for r in completion.rounds)
        return out

    made._model_generate = timed
    results: dict[str, Any] = harness.simple_evaluate(
        model=made, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
    )
    scored = [n for n, c in results["configs"].items() if c["output_type"] != "generate_until"]
    if scored and not lossless:
        warnings.warn(
            f"{', '.join(scored)}: the target alone scores given texts, so these results say "
            f"nothing of {model.rule}",
            ForerunWarning,
            stacklevel=2,
        )
    stats = Stats.of(rounds, 0, 0.0, 0.0, seconds)
    results["forerun"] = asdict(model) | {"lossless": lossless, "texts": texts}
    results["forerun"] |= {name: getattr(stats, name) for name in REPORTED}
    return results


def _harnessed(how: Evaluated) -> tuple[Any, Newest]:
    """lm-eval's own model over the attached one, or over an engine of another runtime."""
    kind = optional("lm_eval.models.huggingface", "lm-eval").HFLM
    if how.runtime != "torch":
        return _over_engine(kind, how)
    hf, tokenizer = load_model(how.target, dtype=how.dtype), load_tokenizer(how.target)
    speculative = attach(hf, how.draft, how.controller, how.rule, tokenizer)
    made = kind(pretrained=hf, tokenizer=tokenizer, batch_size=how.batch_size)
    return made, lambda: speculative.last


def _over_engine(kind: Any, how: Evaluated) -> tuple[Any, Newest]:
    """An `HFLM` whose texts are written speculatively; given ones are scored one at a time in plain
    passes."""
    model = load(how.target, how.draft, runtime=how.runtime, dtype=how.dtype)
    pad, rows, done = model.tokenizer.pad_token_id, model.target, list[Completion]()
    made = kind(
        pretrained=SimpleNamespace(device=torch.device("cpu"), config=PreTrainedConfig()),
        backend="causal", tokenizer=model.tokenizer, max_length=rows.limit,
        batch_size=how.batch_size,
    )  # fmt: skip
    scored = made._loglikelihood_tokens

    def call(inps: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = inps.tolist()
        try:
            rows.read([text[:1] for text in texts], inps.shape[1])
            return rows.feed(texts)
        finally:
            rows.keep([])

    def generate(
        context: torch.Tensor,
        max_length: int,
        stop: Sequence[str],
        attention_mask: Any,
        **asked: Any,
    ) -> torch.Tensor:
        kept = zip(context, attention_mask.bool(), strict=True)
        drawn = {name: asked[name] for name in DRAWN if name in asked and asked.get("do_sample")}
        most = max_length - context.shape[1]
        done[:] = model.generate(
            [row[inside].tolist() for row, inside in kept], controller=how.controller,
            rule=how.rule, batch_size=how.batch_size,
            sampling=Sampling(**drawn, max_new_tokens=most, stop=tuple(stop)),
        )  # fmt: skip
        for completion in done:
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        texts = [
            torch.tensor([*before, *completion.tokens])
            for before, completion in zip(context.tolist(), done, strict=True)
        ]
        return pad_sequence(texts, batch_first=True, padding_value=pad)

    made._model_call, made._model_generate = call, generate
    made._loglikelihood_tokens = lambda *args, **more: scored(*args, **more | {"override_bs": 1})
    return made, lambda: done
