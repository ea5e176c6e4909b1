"""`forerun audit --server`: texts of a server against another's, or its own without speculation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from forerun.cli.shared.console import note, one_line, stderr, stdout
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import print_json

if TYPE_CHECKING:
    from forerun.lab.server_audit import ServerComparison
    from forerun.prompts import Prompt

KEY = "OPENAI_API_KEY"
SHIPPED_TOKENS = 128
COLOURS = {"near-tie": "yellow", "other text": "red", "fault": "bold red"}


def server_audit(
    url: str,
    against: str | None,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Ask both, judge, and print a line per difference or the document.

    Args:
        url: of the server.
        against: of the other; None: the same one of forerun's with speculation off.
        prompts: texts, token ids or messages.
        settings: how they were chosen, for the document.
        as_json: print one JSON document.

    Raises:
        SettingError: a server that fails or gives no log-probabilities.
        Exit: with code 1 if a text differs by more than a near-tie.
    """
    from forerun.lab.server_audit import OpenAIServer, compare, forerun_plain

    key = os.environ.get(KEY)
    server = OpenAIServer(url, key)
    other = OpenAIServer(against, key) if against else forerun_plain(server, key)
    pairs = []
    try:
        with progress("asking", len(prompts), "prompts") as tell:
            for prompt in prompts:
                most = int(prompt.settings.get("max_new_tokens", SHIPPED_TOKENS))
                content: Any = prompt.content
                content = content if isinstance(content, str) else list(content)
                pairs.append((server.write(content, most), other.write(content, most)))
                tell("asking", len(pairs))
    except KeyboardInterrupt:
        if not pairs:
            raise
        note(stderr(), "interrupted; this is what was compared")
    compared = compare(pairs)
    counts = Counter(str(c.outcome) for c in compared)
    line = f"{counts['identical']:,} of {len(compared):,} identical" + "".join(
        f", {counts[name]:,} {name}" for name in COLOURS
    )
    if as_json:
        print_json(
            _document(compared, prompts, line, {"server": url, "against": against, **settings})
        )
    else:
        for c in compared:
            if c.position is not None:
                stdout().print(_described(c, prompts[c.prompt]), soft_wrap=True)
        note(stdout(), Text(line, "bold"))
    if counts["other text"] or counts["fault"]:
        raise typer.Exit(1)


def _described(compared: ServerComparison, prompt: Prompt) -> Text:
    kind = compared.outcome.value
    shown = " / ".join("(end)" if t is None else repr(one_line(t)) for t in compared.tokens)
    return Text.assemble(
        (kind, COLOURS[kind]),
        f"  {prompt.id}: at output token {compared.position} {shown}: {compared.reason}",
    )


def _document(
    compared: Sequence[ServerComparison],
    prompts: Sequence[Prompt],
    summary: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    from dataclasses import asdict

    differences = [
        {"family": prompts[c.prompt].family, "id": prompts[c.prompt].id, **asdict(c)}
        for c in compared
        if c.position is not None
    ]
    return {"schema": 1, "summary": summary, "compared": len(compared),
            "differences": differences, "settings": settings}  # fmt: skip
