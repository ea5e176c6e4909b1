"""`forerun zoo`: the models that ship."""

from __future__ import annotations

import typer

from forerun.zoo import __main__ as recipe
from forerun.zoo import card as model_card

app = typer.Typer(help="The models that ship: train, evaluate, model card.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def card() -> None:
    """Print the model card: data, licences, losses, metrics, samples."""
    typer.echo(model_card().rstrip("\n"))


for command in recipe.app.registered_commands:
    assert command.callback is not None
    app.command(command.name)(command.callback)
