"""`forerun record`: a trace that any controller can be replayed over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import note, stderr, stdout, table
from forerun.cli.shared.options import OUTPUT, PROMPTS, SAMPLING, option
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import print_json
from forerun.zoo import PENALTY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.cli.shared.prompts import LabPrompt
    from forerun.cli.shared.run import Job
    from forerun.lab.traces.record import Part
    from forerun.lab.traces.trace import Trace

SCHEMA = 1


def record(
    prompts: Annotated[str, options.prompts()],
    output: Annotated[str, options.output("TRACE", "The Parquet file to write.")],
    target: options.Target = None,
    draft: options.DraftModel = None,
    split: options.Split = "val",
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 64,
    depth: Annotated[int, option("K", "Tokens drafted from each position.", panel=OUTPUT)] = 24,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: Annotated[
        float | None,
        option(
            "X",
            "Above 1 makes tokens already in the text unlikely. Default: 1; "
            f"{PENALTY['stories']} for the shipped stories, which loop without it.",
            panel=SAMPLING,
        ),
    ] = None,
    ignore_eos: options.IgnoreEos = False,
    rule: Annotated[
        str,
        option("SPEC", "By what sampled drafts are judged: gumbel or standard.", panel=SAMPLING),
    ] = "gumbel",
    seed: Annotated[
        int,
        option("S", "Prompt i gets the random stream S + i, counted from 0.", panel=SAMPLING),
    ] = 0,
    batch_size: Annotated[int, option("B", "Prompts recorded together.", panel=PROMPTS)] = 16,
    as_json: options.Json = False,
    runtime: options.Runtime = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write down what the draft says at every position of the target's own texts.

    From the file, forerun replay predicts the speed of any controller without running a model.
    Interrupted, it keeps the prompts that are complete.
    """
    from forerun.checks import whole
    from forerun.cli.shared.inputs import make_sampling
    from forerun.cli.shared.prompts import find_prompts, is_shipped, seeded, tokenise
    from forerun.cli.shared.run import Plan, require_draft_model
    from forerun.lab.traces.trace import check_writable

    whole("depth", depth, 1)
    whole("seed", seed)
    check_writable(output)
    common: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "ignore_eos": ignore_eos,
    }
    if repetition_penalty is not None:
        common["repetition_penalty"] = repetition_penalty
    make_sampling({**common, "seed": seed, "max_new_tokens": max_new_tokens})
    own = repetition_penalty is None
    requested = seeded(find_prompts(prompts, split, limit, max_new_tokens, penalised=own), seed)
    require_draft_model(target, draft, "recording")

    plan = Plan(
        target,
        draft,
        "fixed(0)",
        rule,
        batch_size=batch_size,
        runtime=runtime,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    job, chosen = plan.open(lambda reader: tokenise(reader, requested, common))
    about = {
        "prompts": prompts if is_shipped(prompts) else Path(prompts).name,
        "split": split if is_shipped(prompts) else None,
        "limit": limit,
        "seed": seed,
        "rule": rule,
    }
    trace = _record(job, chosen, depth, output, about)
    if as_json:
        from forerun.lab.traces.trace_report import families

        print_json({"schema": SCHEMA, "families": families(trace), "about": trace.about})
        return
    _show(trace, output)


def _record(
    job: Job, prompts: Sequence[LabPrompt], depth: int, output: str, about: dict[str, Any]
) -> Trace:
    """Record under a bar and save, interrupted what is complete."""
    from forerun.lab.traces.record import Task, finish, parts

    tasks = [Task(p.family, p.id, p.ids, p.sampling) for p in prompts]
    done: list[Part] = []

    def save() -> Trace:
        trace = finish(job.model, tasks, done, job.batch_size, about)
        trace.write(output)
        return trace

    try:
        with progress("recording", len(tasks), "prompts") as tell:
            for part in parts(
                job.model, tasks, depth=depth, batch_size=job.batch_size, rule=job.rule
            ):
                done.append(part)
                tell("recording", sum(p.trace.prompts for p in done))
    except KeyboardInterrupt:
        if done:
            note(stderr(), f"interrupted; {output} holds {save().prompts} of {len(tasks)} prompts")
        else:
            note(stderr(), "interrupted before the first batch was complete; nothing is saved")
        raise
    return save()


def _show(trace: Trace, output: str) -> None:
    """The summary, for people."""
    from forerun.lab.traces.trace_report import families

    accepted = ("first drafted kept", f"of {trace.depth} drafted kept")
    shown = table("family", right=("prompts", "tokens", *accepted))
    for family, figures in families(trace).items():
        shown.add_row(
            family,
            f"{figures['prompts']:,}",
            f"{figures['tokens']:,}",
            f"{figures['first_kept'] * 100:.1f} %",
            f"{figures['run_kept']:.2f}",
        )
    stdout().print(shown)
    spent = trace.about["seconds"]
    note(
        stdout(),
        f"\n{spent['total']:.1f} s, of which writing the texts took {spent['plain']:.1f} s: "
        f"{spent['ratio']:.2f} times plain generation",
    )
    note(stderr(), f"saved to {output}")
