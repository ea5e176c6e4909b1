"""`forerun write`, `build-datastore`, `build-memory`: texts of a target, and what they make without
training."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from forerun.cli.shared import options
from forerun.cli.shared.console import progress, remark, status
from forerun.cli.shared.models import Chat, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim
from forerun.errors import ModelError, SettingError, require
from forerun.prompts import find_prompts, seeded
from forerun.settings import Settings

NAMED = ("target", "trust_remote_code")


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

    from forerun.cli.shared.training_texts import Archive, written

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
        lines = written(rows, texts, lambda: job.model, batch_size, top or None)
        for count, line in enumerate(lines, 1):
            tokens += (len(line["ids"]) - line["n"]) * (count > before)
            tell("texts", count)
    rate = tokens / (time.perf_counter() - began)
    new = len(texts.lines) - before
    wrote = f"{tokens:,} tokens of {new} texts, {rate:,.0f} tokens/s" if new else "nothing"
    remark(f"wrote {wrote}; {output} holds {len(texts.lines)} of {len(rows)} texts")


@options.command
def build_datastore(
    data: Annotated[str, option("PATH")],
    output: Annotated[str, options.output("FILE", "Where the datastore goes.")],
    models: Annotated[Models, Fields(Models, only=NAMED)],
    tokens: Annotated[int, option("N", "Most tokens to keep.")] = 10_000_000,
) -> None:
    """Make a datastore of texts: the drafter rest continues as they do.

    Takes 12 bytes of memory per token while drafting, and about ten times that while it is made.
    The tokenizer is that of the target; use it as --draft "rest('FILE')".

    Args:
        data: a text file, a folder of .txt files, or a .jsonl file of {"text": ...}.
    """
    require(tokens >= 1, "tokens", tokens, "≥ 1")
    claim(output)
    from forerun.cli.shared.training_texts import read_texts

    texts = read_texts(data)
    if texts is None:
        raise SettingError(f'{data} holds prompts; give texts, or lines of {{"text": ...}}')

    from forerun.drafters.datastore import Datastore

    with status("reading texts"):
        tokenizer, kept, left = _tokenizer(models), [], tokens
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)[:left]
            kept.append(ids)
            left -= len(ids)
            if not left:
                break
        Datastore.build(kept).save(output)
    _saved(f"{tokens - left:,} tokens of {len(kept)} text(s)", output)


@options.command
def build_memory(
    texts: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files of forerun write.")],
    output: Annotated[str, options.output("FILE", "Where the table goes.")],
    models: Annotated[Models, Fields(Models, only=NAMED)],
    entries: Annotated[int, option("N", "Entries to keep, 8 bytes each.")] = 60_000,
) -> None:
    """Make a table of the n-grams that a target wrote, for the drafter memory.

    Takes seconds for millions of tokens. It is the target's whose tokenizer it was made with; use
    it as --draft "memory('FILE')".
    """
    require(entries >= 1, "entries", entries, "≥ 1")
    claim(output)
    from forerun.cli.shared.training_texts import read_written
    from forerun.drafters.memory import fingerprint
    from forerun.drafters.ngrams import NGrams

    with status("reading texts"):
        documents = [text for file in texts for text in read_written(file)]
        written = [(text.ids, text.start + 1) for text in documents]
        tokens = sum(document.positions for document in documents)
        if not tokens:
            raise SettingError("the texts hold no written token; give files of forerun write")
        tokenizer = _tokenizer(models)
    with status("counting"):
        table = NGrams.build(written, entries)
        about = {"texts": str(len(written)), "tokens": str(tokens)}
        table.save(output, fingerprint(tokenizer), about)
    _saved(f"{len(table):,} entries of {tokens:,} tokens", output)


def _tokenizer(models: Models) -> Any:
    from forerun import zoo
    from forerun.runtime import load_tokenizer

    tokenizer = load_tokenizer(zoo.locate(models.target), models.trust_remote_code)
    if tokenizer is None:
        raise ModelError(f"{models.target} has no tokenizer")
    return tokenizer


def _saved(what: str, output: str) -> None:
    remark(f"{what}, {decimal(Path(output).stat().st_size)}: {output}")
