"""The command line: one file per subcommand.

Heavy imports happen inside the commands, so that help, lists and cards are quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forerun.cli.audit import audit
from forerun.cli.bench import app as bench
from forerun.cli.build_datastore import build_datastore
from forerun.cli.build_memory import build_memory
from forerun.cli.calibrate import app as calibrate
from forerun.cli.chat import chat
from forerun.cli.cite import cite
from forerun.cli.costs import costs
from forerun.cli.demo import demo
from forerun.cli.generate import generate
from forerun.cli.info import info
from forerun.cli.listing import show
from forerun.cli.record import record
from forerun.cli.replay import replay
from forerun.cli.serve import serve
from forerun.cli.shared.guard import guarded
from forerun.cli.sweep import app as sweep
from forerun.cli.train_draft import train_draft, train_exits
from forerun.cli.tune import tune
from forerun.cli.write import write
from forerun.cli.zoo import app as zoo
from forerun.errors import SettingError

app = typer.Typer(
    name="forerun",
    help="Language models that run ahead of themselves: adaptive speculative decoding, lossless "
    "by default.",
    add_completion=False,
    pretty_exceptions_enable=False,
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


app.command("generate")(generate)
app.command("chat")(chat)
app.command("demo")(demo)
app.command("serve")(serve)
app.command("list")(show)
app.command("info")(info)
app.command("cite")(cite)
app.command("record")(record)
app.command("costs")(costs)
app.command("replay")(replay)
app.command("tune")(tune)
app.add_typer(sweep, name="sweep")
app.command("audit")(audit)
app.add_typer(bench, name="bench")
app.command(
    "train-exits",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(train_exits)
app.command("build-datastore")(build_datastore)
app.command("write")(write)
app.command("build-memory")(build_memory)
app.command("train-draft")(train_draft)
app.add_typer(calibrate, name="calibrate")
app.add_typer(zoo, name="zoo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises.

    0: done; 1: it could not be done; 2: the command or a setting is wrong; 130: interrupted;
    143: terminated.
    """

    def command() -> Any:
        words = sys.argv[1:] if argv is None else list(argv)
        if any("\0" in word for word in words):
            raise SettingError("an argument holds a NUL character; no name or text may")
        return app(args=words, standalone_mode=False, prog_name="forerun")

    return guarded(command, _flags)


def _flags() -> dict[str, str]:
    """The flag of every option that any command has."""
    todo: list[Any] = [typer.main.get_command(app)]
    flags: dict[str, str] = {}
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        flags |= {p.name: max(p.opts, key=len) for p in command.params if p.opts[0][0] == "-"}
    return flags
