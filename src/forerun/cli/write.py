"""`forerun write`: texts of a target, to make drafts of."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import progress, remark
from forerun.cli.shared.models import Chat, Job, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim
from forerun.errors import GenerationError, require

if TYPE_CHECKING:
    from forerun.engine import Completion
    from forerun.prompts import Prompt

GROUP = 64  # texts that are added to the file together


@options.command
def write(
    models: Annotated[Models, Fields(Models, without=("draft",))],
    chat: Annotated[Chat, Fields(Chat)],
    prompts: Annotated[str, options.prompts()],
    output: Annotated[str, options.output("FILE.jsonl.gz", "Where the texts go.")],
    limit: Annotated[int | None, options.limit()] = None,
    max_new_tokens: Annotated[int, option("N", "Most tokens of an answer.")] = 128,
    temperature: Annotated[float, option("T")] = 0.0,
    seed: Annotated[int, option("S", "Of the first drawn answer; the next has the next one.")] = 0,
    top: Annotated[int, option("N")] = 16,
    batch_size: Annotated[int, option("B", "Texts written together.")] = 48,
) -> None:
    """Let a target answer prompts, and keep what it wrote: the base of drafts, tables and settings.

    Every line of the file is a JSON object: "ids", the prompt's tokens and the answer's; "n", how
    many are the prompt's; "id", "kind" and "answer"; and by place of the answer "top" and
    "logprobs", the likeliest tokens there. Interrupted, the same command goes on.

    Args:
        temperature: 0 is greedy; above, answers are drawn, each with a seed of its own.
        top: keep the N likeliest tokens at each place; 0 keeps none.
    """
    require(max_new_tokens >= 1, "max-new-tokens", max_new_tokens, "≥ 1")
    require(top >= 0, "top", top, "≥ 0")
    claim(output)

    from forerun.cli.shared.written import Archive
    from forerun.prompts import find_prompts, seeded
    from forerun.settings import Settings

    asked = seeded(find_prompts(prompts, "val", limit, max_new_tokens, penalised=False), seed)
    how = Settings(controller="fixed(0)", draft="none")
    job, rows = models.open(
        asked, {"temperature": temperature}, how, batch_size, chat=chat, skip_long=True
    )
    about = {"target": job.about["target"], "chat": chat.key, "temperature": temperature}
    texts = Archive(Path(output), about | {"top": top, "max_new_tokens": max_new_tokens})
    done = {line["id"] for line in texts.lines}
    left = [row for row in rows if f"{row.family}/{row.id}" not in done]
    began, tokens = time.perf_counter(), 0
    with progress("texts", len(rows), "texts") as tell:
        for group in _groups(job, left, top):
            texts.append([_line(row, completion) for row, completion in group])
            tokens += sum(len(completion.tokens) for _, completion in group)
            tell("texts", len(texts.lines))
    rate = tokens / (time.perf_counter() - began)
    wrote = f"{tokens:,} tokens of {len(left)} texts, {rate:,.0f} tokens/s" if left else "nothing"
    remark(f"wrote {wrote}; {output} holds {len(texts.lines)} of {len(rows)} texts")


def _groups(
    job: Job, rows: Sequence[Prompt], top: int
) -> Iterator[list[tuple[Prompt, Completion]]]:
    """Answers as they come, `GROUP` at a time."""
    group = []
    for event in job.model.stream(
        [row.ids for row in rows], sampling=[row.sampling for row in rows],
        batch_size=job.batch_size, plain=True, logprobs=top or None, first_token_soon=False,
    ) if rows else ():  # fmt: skip
        if (completion := event.completion) is not None:
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
            group.append((rows[event.request], completion))
            if len(group) == GROUP:
                yield group
                group = []
    if group:
        yield group


def _line(row: Prompt, completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"{row.family}/{row.id}", "kind": row.family, "n": len(row.ids),
            "ids": [*row.ids, *completion.tokens], "answer": completion.text}  # fmt: skip
    if completion.logprobs:
        line["top"] = [[token for token, _ in place.top] for place in completion.logprobs]
        line["logprobs"] = [[round(p, 3) for _, p in place.top] for place in completion.logprobs]
    return line
