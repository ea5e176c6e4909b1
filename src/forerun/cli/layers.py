"""`forerun layers`: what every layer would say, and how sure it is."""

import io
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import one_line, status, stdout, table
from forerun.cli.shared.models import ALONE, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim, print_json
from forerun.errors import SettingError, require
from forerun.prompts import Prompt, read_text

CELL = 8  # characters of a token that are shown
WIDTH = 22  # of the columns before the tokens
Layer = Sequence[dict[str, Any]]  # by position `id`, `token` and `probability`


@options.command
def layers(
    models: Annotated[Models, Fields(Models, only=ALONE)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_new_tokens: options.MaxNewTokens = 10,
    sure: Annotated[float, option("P", "Probability from which a layer counts as sure.")] = 0.7,
    output: Annotated[str | None, options.output("FILE.svg", "Also draw the table.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show the likeliest token after every layer of a target, and where it is sure and wrong.

    The model's own head is read after every layer, at each token of its greedy continuation. Green
    is what the last layer says, too; red is sure and wrong: what early exits have to fear.

    Args:
        prompt: the text to continue; - reads stdin.
    """
    require(0 < sure <= 1, "sure", sure, "above 0 and at most 1")
    require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "≥ 1")
    if output is not None and not output.endswith(".svg"):
        raise SettingError(f"the picture is an SVG file, got {output!r}; name it layers.svg")
    claim(output)
    text = read_text(prompt).removesuffix("\n") if prompt == "-" else prompt
    job, rows = models.alone.open([Prompt(text)], {"max_new_tokens": max_new_tokens})
    from forerun.lab.exits.exit_replay import view_layers

    with status("reading layers"):
        how = {"controller": "fixed(0)", "sampling": rows[0].sampling}
        written = job.model.generate([rows[0].ids], **how)[0].tokens
        ids = [*rows[0].ids, *written]
        tokens, probs = view_layers(job.model.target.executor.module(), ids, len(written))

    seen = [
        [
            {"id": token, "token": one_line(job.model.tokenizer.decode([token])), "probability": p}
            for token, p in zip(*layer, strict=True)
        ]
        for layer in zip(tokens, probs, strict=True)
    ]
    width = WIDTH + (CELL + 2) * len(written)
    if as_json:
        print_json({"target": job.about["target"], "layers": seen})
    else:
        console = stdout()
        fitting = max((console.width - WIDTH) // (CELL + 2), 1)
        if not console.is_terminal:
            console.width, fitting = max(console.width, width), len(written)
        console.print(_table(seen, sure, fitting))
    if output is not None:
        drawn = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
        drawn.print(_table(seen, sure, len(written)))
        drawn.save_svg(output, title="forerun layers")


def _table(layers: Sequence[Layer], sure: float, most: int) -> RenderableType:
    """A row per layer, the last on top; a column for each of the first `most` tokens."""
    made = table("layer", right=("sure", "right"), no_wrap=True)
    for _ in layers[-1][:most]:
        made.add_column("", no_wrap=True, width=CELL)
    for number, layer in reversed(list(enumerate(layers, 1))):
        share, right = share_sure(layer, layers[-1], sure)
        cells = [
            Text(own["token"][:CELL], _style(own["id"] == best["id"], own["probability"], sure))
            for own, best in zip(layer, layers[-1], strict=True)
        ]
        known = "–" if right != right else f"{right:.0%}"
        made.add_row(str(number), f"{share:.0%}", known, *cells[:most])
    return made


def share_sure(layer: Layer, last: Layer, sure: float) -> tuple[float, float]:
    """Share of positions at which a layer is sure, and how many of these are right: say what the
    last layer says; NaN if there are none."""
    pairs = zip(layer, last, strict=True)
    right = [own["id"] == best["id"] for own, best in pairs if own["probability"] >= sure]
    return len(right) / len(layer), sum(right) / len(right) if right else float("nan")


def _style(right: bool, prob: float, sure: float) -> str:
    """Green if right, red if sure and wrong, dim if neither; bold if sure."""
    if prob >= sure:
        return "bold green" if right else "bold white on red"
    return "green" if right else "dim"
