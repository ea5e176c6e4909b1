"""`forerun build-memory`: a table of n-grams for the drafter memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from forerun.cli.shared import options
from forerun.cli.shared.console import note, status, stderr
from forerun.cli.shared.models import Models
from forerun.cli.shared.options import Fields, option
from forerun.errors import ModelError, SettingError, require


@options.command
def build_memory(
    texts: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files of forerun write.")],
    output: Annotated[str, options.output("FILE", "Where the table goes.")],
    models: Annotated[Models, Fields(Models, only=("target", "trust_remote_code"))],
    entries: Annotated[int, option("N", "Entries to keep, 8 bytes each.")] = 60_000,
) -> None:
    """Make a table of the n-grams that a target wrote, for the drafter memory.

    Takes seconds for millions of tokens. It is the target's whose tokenizer it was made with; use
    it as --draft "memory('FILE')".
    """
    require(entries >= 1, "entries", entries, "≥ 1")

    from forerun import zoo
    from forerun.cli.shared.written import read_written
    from forerun.drafters.memory import fingerprint
    from forerun.drafters.ngrams import NGrams
    from forerun.runtime import load_tokenizer

    with status("reading texts"):
        written = [(ids, given) for file in texts for ids, given in read_written(file)]
        tokens = sum(len(ids) - given for ids, given in written)
        if not tokens:
            raise SettingError("the texts hold no written token; give files of forerun write")
        tokenizer = load_tokenizer(zoo.locate(models.target), models.trust_remote_code)
        if tokenizer is None:
            raise ModelError(f"{models.target} has no tokenizer")
    with status("counting"):
        table = NGrams.build(written, entries)
        about = {"texts": str(len(written)), "tokens": str(tokens)}
        table.save(output, fingerprint(tokenizer), about)
    size = decimal(Path(output).stat().st_size)
    note(stderr(), f"{len(table):,} entries of {tokens:,} tokens, {size}: {output}")
