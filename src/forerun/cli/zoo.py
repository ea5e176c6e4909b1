"""`forerun zoo`: the models that ship."""

import typer

from forerun.cli.shared import options
from forerun.errors import SettingError
from forerun.zoo import card as model_card

app = options.group("The models that ship: the model card.")

MOVED = (
    "train", "translator", "pairs", "bleu", "finish", "average", "distill", "curves", "evaluate",
    "prompts",
)  # fmt: skip
"""Commands of the recipe, which is in the repository and not in the package."""


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
