"""`forerun zoo`: the models that ship."""

from __future__ import annotations

import typer

from forerun.errors import SettingError
from forerun.zoo import card as model_card

app = typer.Typer(help="The models that ship: the model card.", no_args_is_help=False)

MOVED = (
    "train",
    "translator",
    "pairs",
    "bleu",
    "finish",
    "average",
    "distill",
    "curves",
    "evaluate",
    "prompts",
)
"""Commands of the recipe, which is in the repository and not in the package."""


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def card() -> None:
    """Print the model card: data, licences, losses, metrics, samples."""
    typer.echo(model_card().rstrip("\n"))


def _moved(context: typer.Context) -> None:
    name = context.info_name
    raise SettingError(
        f"`zoo {name}` is `python -m recipes {name}` now, from the root of forerun's repository"
    )


for name in MOVED:
    app.command(
        name,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_moved)
