"""The command line: one file per subcommand, imported when it is called.

Help of all commands needs none of them: their lines are in `COMMANDS`.
"""

import atexit
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from forerun.cli.shared.guard import guarded
from forerun.errors import SettingError

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Use": {
        "generate": ("generate:generate", "Write text with a model that runs ahead of itself."),
        "chat": ("chat:chat", "Talk to a model that runs ahead of itself."),
        "serve": ("serve:serve", "Serve a model over HTTP."),
        "demo": ("demo:demo", "Speculative against plain decoding on three prompts."),
        "list": ("parts:show", "List what is available, one line each."),
        "info": ("parts:info", "Show the full card of a part."),
        "cite": ("parts:cite", "Print BibTeX of the papers behind parts."),
        "zoo": ("parts:app", "The models that ship: the model card."),
    },
    "Lab": {
        "record": ("record:record", "Write down what the drafter proposes at every position."),
        "costs": ("costs:costs", "Measure a draft step, target passes by width."),
        "replay": ("replay:replay", "Predict speed, rounds and drafted tokens of controllers."),
        "ablate": ("replay:ablate", "Replay a controller without each of its mechanisms."),
        "tune": ("tune:tune", "Search the parameters of controllers on a trace."),
        "sweep": ("sweep:app", "Tune a drafter's settings for your model."),
        "lm-eval": (
            "lm_eval:lm_eval",
            "Evaluate a model that speculates by lm-evaluation-harness (extra lm-eval).",
        ),
        "layers": ("layers:layers", "Show the likeliest token after every layer of a target."),
        "calibrate": ("calibrate:app", "Measure the settings a method needs for your models."),
        "audit": ("audit:audit", "Compare speculative with plain decoding, token by token."),
        "bench": ("bench:app", "Measure methods and other implementations side by side."),
    },
    "Train": {
        "train-draft": ("train_draft:train_draft", "Train a draft that belongs to its target."),
        "write": ("build:write", "Let a target answer prompts, and keep what it wrote."),
        "build-memory": ("build:build_memory", "Make a table of the n-grams that a target wrote."),
        "build-datastore": ("build:build_datastore", "Make a datastore of texts."),
    },
}
"""By panel: the module and name of each command, and its line of help."""


class LazyCommands(Mapping[str, Any]):
    """Commands by name; the module of one is imported when it is looked up."""

    places: ClassVar = {
        name: place for panel in COMMANDS.values() for name, (place, _) in panel.items()
    }

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, _, attribute = self.places[name].partition(":")
            part = getattr(import_module(f"forerun.cli.{module}"), attribute)
            if isinstance(part, typer.Typer):
                command: Any = typer.main.get_group(part)
            else:
                alone = typer.Typer(add_completion=False)
                alone.command(name)(part)
                command = typer.main.get_command(alone)
            command.name = name
            self._loaded[name] = command
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class Root(TyperGroup):
    """All commands; its help is made without importing any."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands: Any = LazyCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, commands in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])


app = typer.Typer(
    name="forerun",
    cls=Root,
    help="Language models that run ahead of themselves: adaptive speculative decoding, lossless "
    "by default.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        from forerun import __version__

        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises. 0: done; 1: it could not be
    done; 2: the command or a setting is wrong; 130: interrupted; 143: terminated."""

    def command() -> Any:
        words = sys.argv[1:] if argv is None else list(argv)
        if any(re.search("[\0\ud800-\udc7f\udd00-\udfff]", word) for word in words):
            raise SettingError("an argument holds NUL or half a character; no name or text may")
        return commands()(args=words, standalone_mode=False, prog_name="forerun")

    code = guarded(command, _flags)
    if argv is None and code in (130, 143):  # audit's process was at times aborted as it ended
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


@cache
def commands() -> Any:
    """All of them, as click has them."""
    return typer.main.get_command(app)


def _flags() -> dict[str, str]:
    """The flag of every option that any command has."""
    todo: list[Any] = [commands()]
    flags: dict[str, str] = {}
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        flags |= {p.name: max(p.opts, key=len) for p in command.params if p.opts[0][0] == "-"}
    return flags
