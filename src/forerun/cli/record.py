"""`forerun record`: a trace that any controller can be replayed over."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from forerun.checks import whole
from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, remark, stdout, table
from forerun.cli.shared.models import Chat, Job, Models
from forerun.cli.shared.options import OUTPUT, PROMPTS, SAMPLING, Fields, option
from forerun.cli.shared.report import claim, report
from forerun.lab.traces.trace import Trace, families, pyarrow_modules
from forerun.prompts import Prompt, find_prompts, is_shipped, seeded
from forerun.requests import Sampling
from forerun.settings import Settings
from forerun.zoo import PENALTY

SCHEMA = 1
COPYING = "lookup", "suffix"  # drafters whose settings exports give to other engines
TRANSFORM = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
PENALISED = Annotated[
    float | None,
    option(
        "X",
        "Above 1 makes tokens already in the text unlikely. Default: 1; "
        f"{PENALTY['stories']} for the shipped stories, which loop without it.",
        panel=SAMPLING,
    ),
]


@options.command
def record(
    prompts: Annotated[str, options.prompts()],
    output: Annotated[str, options.output("TRACE", "The Parquet file to write.")],
    models: Annotated[Models, Fields(Models)],
    sampling: Annotated[
        dict[str, Any], Fields(Sampling, SAMPLING, TRANSFORM, repetition_penalty=(PENALISED, None))
    ],
    chat: Annotated[Chat, Fields(Chat)],
    split: options.Split = "val",
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 64,
    depth: Annotated[int, option("K", "Tokens drafted from each position.", panel=OUTPUT)] = 24,
    rule: Annotated[str, option("SPEC", panel=SAMPLING)] = "gumbel",
    seed: Annotated[int, option("S", panel=SAMPLING)] = 0,
    batch_size: Annotated[int, option("B", "Prompts recorded together.", panel=PROMPTS)] = 16,
    as_json: options.Json = False,
) -> None:
    """Write down what the drafter proposes at every position of the target's own texts.

    From the file, forerun replay predicts the speed of any controller without running a model.
    Interrupted, it keeps the prompts that are complete.

    Args:
        rule: by what sampled drafts are judged: gumbel or standard.
        seed: prompt i gets the random stream S + i, counted from 0.
    """
    whole("depth", depth, 1)
    whole("seed", seed)
    pyarrow_modules()
    claim(output)
    common = options.sampling({**sampling, "max_new_tokens": max_new_tokens})
    own = sampling["repetition_penalty"] is None
    requested = seeded(find_prompts(prompts, split, limit, max_new_tokens, penalised=own), seed)
    how = Settings(controller="fixed(0)", rule=rule)
    job, chosen = models.open(requested, common, how, batch_size, chat=chat)
    spec = str(job.about["draft"])
    about = {
        "prompts": prompts if is_shipped(prompts) else Path(prompts).name,
        "split": split if is_shipped(prompts) else None,
        "limit": limit,
        "seed": seed,
        "rule": rule,
        "drafter": spec if spec.partition("(")[0] in COPYING else None,
        "chat": job.about["chat"],
    }
    trace = _record(job, chosen, depth, output, about)
    document = {"schema": SCHEMA, "families": families(trace), "about": trace.about}
    report(document, partial(_show, document), as_json, output)


def _record(
    job: Job, prompts: Sequence[Prompt], depth: int, output: str, about: dict[str, Any]
) -> Trace:
    """Record under a bar and save, interrupted what is complete."""
    from forerun.lab.traces.record import Task, parts

    tasks = [Task(str(p.family), str(p.id), p.ids, p.sampling) for p in prompts]
    trace: Trace | None = None

    def interrupted(count: int) -> None:
        remark(f"interrupted; drafting for {count} texts that are complete")

    made = parts(
        job.model, tasks, depth=depth, batch_size=job.batch_size, rule=job.rule, about=about,
        interrupted=interrupted,
    )  # fmt: skip
    try:
        with progress("recording", len(tasks), "prompts") as tell:
            for trace in made:
                tell("recording", trace.prompts)
    except KeyboardInterrupt:
        if trace is None:
            remark("interrupted before the first text was complete; nothing is saved")
        else:
            trace.write(output)
            remark(f"interrupted; {output} holds {trace.prompts} of {len(tasks)} prompts")
        raise
    assert trace is not None, "there is a prompt at least"
    trace.write(output)
    return trace


def _show(document: dict[str, Any]) -> None:
    about = document["about"]
    accepted = ("first drafted kept", f"of {about['depth']} drafted kept")
    shown = table("family", right=("prompts", "tokens", *accepted))
    for family, own in document["families"].items():
        counts = f"{own['prompts']:,}", f"{own['tokens']:,}"
        shown.add_row(family, *counts, f"{own['first_kept'] * 100:.1f} %", f"{own['run_kept']:.2f}")
    stdout().print(shown)
    spent = about["seconds"]
    note(
        f"\n{spent['total']:.1f} s, of which writing the texts took {spent['plain']:.1f} s: "
        f"{spent['ratio']:.2f} times plain generation"
    )
