"""`forerun lm-eval`: tasks of lm-evaluation-harness, and what a rule costs there."""

from pathlib import Path
from typing import Annotated

from forerun import zoo
from forerun.cache import write_json
from forerun.checks import whole
from forerun.cli.shared import options
from forerun.cli.shared.console import note
from forerun.cli.shared.models import Models, PolicyOptions, quiet
from forerun.cli.shared.options import PROMPTS, Fields, option
from forerun.cli.shared.report import claim, print_json


@options.command
def lm_eval(
    tasks: Annotated[str, option("NAME,...", panel=PROMPTS)],
    models: Annotated[Models, Fields(Models, only=("target", "draft", "dtype"))],
    policy: Annotated[PolicyOptions, Fields(PolicyOptions, only=("controller", "rule"))],
    runtime: Annotated[str, option("SPEC", panel=options.MODELS)] = "torch",
    include_path: Annotated[str | None, option("DIR", panel=PROMPTS)] = None,
    limit: Annotated[int | None, option("N", panel=PROMPTS)] = None,
    batch_size: Annotated[int, option("B", panel=PROMPTS)] = 16,
    output: Annotated[str | None, options.output("FILE", "Also save the results as JSON.")] = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a model that speculates by lm-evaluation-harness (extra lm-eval).

    The results gain acceptance, tokens per second and, under a lossy rule, the drift: what a rule
    costs on a task. Tasks that score given texts see no rule.

    Args:
        tasks: tasks of lm-evaluation-harness.
        runtime: what runs the models: torch (lm-eval's own model class, attached), or openvino.
        include_path: a folder of further tasks.
        limit: only the first N documents of each task.
        batch_size: texts decoded together.
    """
    whole("batch_size", batch_size, 1)
    claim(output)
    from forerun.hosts.lm_eval import Evaluated, evaluate
    from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, default_draft

    model = Evaluated(
        str(zoo.locate(models.target)), models.draft or str(default_draft(models.target)),
        policy.controller or DEFAULT_CONTROLLER, policy.rule or DEFAULT_RULE, runtime,
        models.dtype, batch_size,
    )  # fmt: skip
    with quiet():
        evaluated = evaluate(model, tasks.split(","), limit, include_path)
    results = {key: evaluated[key] for key in ("results", "configs", "forerun")}
    if output:
        write_json(Path(output), results)
    if as_json:
        return print_json(results)
    from lm_eval.utils import make_table

    print(make_table(evaluated))
    for name, value in results["forerun"].items():
        note(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
