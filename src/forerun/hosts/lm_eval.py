"""lm-evaluation-harness over models that speculate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.controllers import CONTROLLERS
from forerun.engine.results import Completion, Stats
from forerun.errors import ForerunWarning, SettingError, optional
from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, load
from forerun.rules import RULES
from forerun.runtime.load import load_model, load_tokenizer


@dataclass(frozen=True)
class Evaluated:
    """A model that speculates, as it is to be evaluated.

    Args:
        target: a folder, a Hugging Face id, or a GGUF file.
        draft: who runs ahead, as `forerun.transformers.attach` takes it.
        controller, rule: of every text; specs.
        runtime: "torch" is lm-eval's own `HFLM` over the attached model; any other is a
            `forerun.Model`.
        dtype: of the weights, as `forerun.load` takes it.
        batch_size: texts decoded together.
    """

    target: str
    draft: str
    controller: str = DEFAULT_CONTROLLER
    rule: str = DEFAULT_RULE
    runtime: str = "torch"
    dtype: str | None = None
    batch_size: int = 16


@dataclass
class Speculated:
    """The texts that a model wrote in an evaluation."""

    completions: list[Completion] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, completions: Sequence[Completion], seconds: float) -> None:
        self.completions += completions
        self.seconds += seconds

    def summary(self) -> dict[str, Any]:
        """Over all texts; rates are None if nothing was generated."""
        rounds = [r for completion in self.completions for r in completion.rounds]
        stats = Stats.of(rounds, 0, 0.0, 0.0, self.seconds)
        names = ("tokens", "acceptance_rate", "block_efficiency", "tokens_per_second")
        shown = {name: getattr(stats, name) for name in (*names, "drift_mean", "drift_max")}
        return {"texts": len(self.completions), **shown}


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
    speculated, rule = Speculated(), RULES.make(model.rule)
    run = _attached if model.runtime == "torch" else _own
    results: dict[str, Any] = harness.simple_evaluate(
        model=run(model, speculated), tasks=list(tasks), task_manager=manager, limit=limit,
        log_samples=False,
    )  # fmt: skip
    scored = [n for n, c in results["configs"].items() if c["output_type"] != "generate_until"]
    if scored and not rule.lossless:
        warnings.warn(
            f"{', '.join(scored)}: the target alone scores given texts, so these results say "
            f"nothing of {model.rule}",
            ForerunWarning,
            stacklevel=2,
        )
    results["forerun"] = {
        "target": model.target,
        "draft": model.draft,
        "controller": CONTROLLERS.text(CONTROLLERS.make(model.controller)),
        "rule": RULES.text(rule),
        "lossless": rule.lossless,
        "runtime": model.runtime,
        **speculated.summary(),
    }
    return results


def _attached(how: Evaluated, speculated: Speculated) -> Any:
    """lm-eval's own model, whose `generate` is ours."""
    from forerun.hosts.attach import attach

    model, tokenizer = load_model(how.target, dtype=how.dtype), load_tokenizer(how.target)
    speculative = attach(model, how.draft, how.controller, how.rule, tokenizer)
    attached = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = attached(*args, **kwargs)
        speculated.add(speculative.last, time.perf_counter() - began)
        return out

    model.generate = generate
    made = optional("lm_eval.models.huggingface", "lm-eval").HFLM
    return made(pretrained=model, tokenizer=tokenizer, batch_size=how.batch_size)


def _own(how: Evaluated, speculated: Speculated) -> Any:
    from forerun.hosts.lm_eval_model import HarnessModel

    model = load(how.target, how.draft, runtime=how.runtime, dtype=how.dtype)
    shared: Mapping[str, Any] = {
        "controller": how.controller, "rule": how.rule, "batch_size": how.batch_size
    }  # fmt: skip
    return HarnessModel(model, speculated.add, shared)
