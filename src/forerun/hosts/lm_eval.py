"""lm-evaluation-harness over models that speculate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from forerun.engine.results import Completion, Stats
from forerun.errors import ForerunWarning, SettingError, optional
from forerun.hosts.speculative import Speculative, attach
from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, Model, load
from forerun.rules import RULES
from forerun.runtime.load import load_model, load_tokenizer

REPORTED = (
    "tokens", "acceptance_rate", "block_efficiency", "tokens_per_second", "drift_mean", "drift_max"
)  # fmt: skip
"""Statistics over all texts that were written; rates are None if there are none."""


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
    harness, kind, manager = (
        optional(f"lm_eval{part}", "lm-eval") for part in ("", ".models.huggingface", ".tasks")
    )
    known = manager.TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not known.match_tasks([name])]:
        raise SettingError(f"lm-eval has no task {', '.join(unknown)}; see `lm-eval ls tasks`")
    made, speculative = _attached(model, kind.HFLM)
    generate, seconds, texts = made._model_generate, list[float](), list[Completion]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        texts.extend(speculative.last)
        return out

    made._model_generate = timed
    results: dict[str, Any] = harness.simple_evaluate(
        model=made, tasks=list(tasks), task_manager=known, limit=limit, log_samples=False
    )
    lossless = RULES.make(model.rule).lossless
    scored = [n for n, c in results["configs"].items() if c["output_type"] != "generate_until"]
    if scored and not lossless:
        about = f"so these results say nothing of {model.rule}"
        why = f"{', '.join(scored)}: the target alone scores given texts, {about}"
        warnings.warn(why, ForerunWarning, stacklevel=2)
    stats = Stats.of([r for text in texts for r in text.rounds], 0, 0.0, 0.0, sum(seconds))
    results["forerun"] = asdict(model) | {"lossless": lossless, "texts": len(texts)}
    results["forerun"] |= {name: getattr(stats, name) for name in REPORTED}
    return results


def _attached(how: Evaluated, kind: Any) -> tuple[Any, Speculative]:
    """lm-eval's own model over the attached one. On another runtime that is a form without weights,
    behind which an engine writes, and given texts are scored one at a time in plain passes."""
    engine = None
    if how.runtime == "torch":
        hf, tokenizer = load_model(how.target, dtype=how.dtype), load_tokenizer(how.target)
    else:
        engine = load(how.target, how.draft, runtime=how.runtime, dtype=how.dtype)
        rows, tokenizer = engine.target, engine.tokenizer
        size = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 2)
        size |= {"vocab_size": rows.vocab_size, "max_position_embeddings": rows.limit}
        shape = LlamaConfig(**size, num_hidden_layers=0, eos_token_id=sorted(engine.eos))
        hf = LlamaForCausalLM(shape)
    speculative = attach(hf, engine or how.draft, how.controller, how.rule, tokenizer)
    made = kind(pretrained=hf, tokenizer=tokenizer, batch_size=how.batch_size)
    if engine is not None:
        made._loglikelihood_tokens = partial(_scored, engine)
        # As criteria they decode all rows for every token: a fourth of a small model's time.
        generate = hf.generate
        hf.generate = lambda stopping_criteria, **given: generate(
            **given, stop=[one.sequence for one in stopping_criteria]
        )
    return made, speculative


def _scored(model: Model, requests: Sequence[Any], *_: Any, **__: Any) -> list[tuple[float, bool]]:
    """Per context and continuation its log-likelihood, and whether no token is likelier."""
    out = []
    for _, before, given in requests:
        ids = [*before, *given][-model.target.limit :]
        known = model.score(ids, top=1)[-len(given) :]
        out.append((sum(one.logprob for one in known), [one.top[0][0] for one in known] == given))
    return out
