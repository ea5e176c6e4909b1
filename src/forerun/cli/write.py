"""`forerun write`: texts of a target, to make drafts of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from forerun.cli.shared import options
from forerun.cli.shared.console import progress, remark
from forerun.cli.shared.models import Chat, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim
from forerun.errors import require


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

    from forerun.cli.shared.written import Archive, written
    from forerun.prompts import find_prompts, seeded
    from forerun.settings import Settings

    asked = seeded(find_prompts(prompts, "val", limit, max_new_tokens, penalised=False), seed)
    how = Settings(controller="fixed(0)", draft="none")
    job, rows = models.open(
        asked, {"temperature": temperature}, how, batch_size, chat=chat, skip_long=True
    )
    about = {"target": job.about["target"], "chat": chat.key, "temperature": temperature}
    texts = Archive(Path(output), about | {"top": top, "max_new_tokens": max_new_tokens})
    before = len(texts.lines)
    began, tokens = time.perf_counter(), 0
    with progress("texts", len(rows), "texts") as tell:
        for count, line in enumerate(written(job, rows, texts, top or None), 1):
            tokens += (len(line["ids"]) - line["n"]) * (count > before)
            tell("texts", count)
    rate = tokens / (time.perf_counter() - began)
    new = len(texts.lines) - before
    wrote = f"{tokens:,} tokens of {new} texts, {rate:,.0f} tokens/s" if new else "nothing"
    remark(f"wrote {wrote}; {output} holds {len(texts.lines)} of {len(rows)} texts")
