"""`forerun build-datastore`: texts for the drafter rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.filesize import decimal

from forerun.cli.shared import options
from forerun.cli.shared.console import note, status, stderr
from forerun.cli.shared.models import Models
from forerun.cli.shared.options import Fields, option
from forerun.errors import ModelError, SettingError, require


@options.command
def build_datastore(
    data: Annotated[str, option("PATH")],
    output: Annotated[str, options.output("FILE", "Where the datastore goes.")],
    models: Annotated[Models, Fields(Models, only=("target", "trust_remote_code"))],
    tokens: Annotated[int, option("N", "Most tokens to keep.")] = 10_000_000,
) -> None:
    """Make a datastore of texts: the drafter rest continues as they do.

    Takes 12 bytes of memory per token while drafting, and about ten times that while it is made.
    The tokenizer is that of the target; use it as --draft "rest('FILE')".

    Args:
        data: a text file, a folder of .txt files, or a .jsonl file of {"text": ...}.
    """
    require(tokens >= 1, "tokens", tokens, "≥ 1")
    folder = Path(output).parent
    if not folder.is_dir():
        raise SettingError(f"{output}: there is no folder {folder}; make it, or name another file")

    from forerun.cli.shared.training_texts import open_source

    source = open_source(data)
    if source.texts is None:
        raise SettingError(f'{data} holds prompts; give texts, or lines of {{"text": ...}}')

    from forerun import zoo
    from forerun.drafters.datastore import Datastore
    from forerun.runtime import load_tokenizer

    with status("reading texts"):
        tokenizer = load_tokenizer(zoo.locate(models.target), models.trust_remote_code)
        if tokenizer is None:
            raise ModelError(f"{models.target} has no tokenizer")
        kept, left = [], tokens
        for text in source.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)[:left]
            kept.append(ids)
            left -= len(ids)
            if not left:
                break
        store = Datastore.build(kept)
        store.save(output)
    size = decimal(Path(output).stat().st_size)
    note(stderr(), f"{tokens - left:,} tokens of {len(kept)} text(s), {size}: {output}")
