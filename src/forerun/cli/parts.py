"""`forerun list`, `info` and `cite`: what is available, and of whom."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import stdout, table
from forerun.errors import SettingError, UnknownNameError
from forerun.registry import Registry, Spec, parse

KINDS = ("controllers", "rules", "drafters")
BIBTEX: dict[str, str] = {
    match[2]: match[0]
    for match in re.finditer(
        r"^@(\w+)\{(\S+),\n.*?^\}\n",
        files("forerun").joinpath("citations.bib").read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
"""Entries of `citations.bib`, by their keys."""

QUESTIONS = {
    "controllers": "how far to run ahead? With a lossless rule it only changes speed; with a lossy "
    "one it also decides which tokens are judged leniently.",
    "rules": "what to keep? It alone decides whether the output is lossless.",
    "drafters": "who runs ahead?",
}


@dataclass(frozen=True)
class Card:
    """One registered part."""

    kind: str
    """"controllers", "rules" or "drafters"."""
    name: str
    cls: type[Any]

    @property
    def summary(self) -> str:
        return str(getattr(self.cls, "summary", ""))

    @property
    def paper(self) -> str:
        return str(getattr(self.cls, "paper", ""))

    @property
    def lossless(self) -> bool | None:
        """Of a rule; None for others, which cannot change the output."""
        return bool(self.cls.lossless) if self.kind == "rules" else None

    @property
    def settings(self) -> list[tuple[str, str | None]]:
        """Names and defaults; None where a setting must be given."""
        if not is_dataclass(self.cls):
            return []
        out: list[tuple[str, str | None]] = []
        for f in fields(self.cls):
            if f.init:
                default = f.default_factory() if f.default_factory is not MISSING else f.default
                out.append((f.name, None if default is MISSING else _literal(default)))
        return out

    @property
    def signature(self) -> str:
        """Settings in one line: ``length=5, eta=0.3``."""
        return ", ".join(n if d is None else f"{n}={d}" for n, d in self.settings)

    @property
    def doc(self) -> str:
        """The docstring; behind its first paragraph what `methods/` has to say, if anything."""
        text = inspect.getdoc(self.cls) or self.summary
        prose = files("forerun").joinpath("methods", self.kind, f"{self.name}.md")
        if not (self.cls.__module__.startswith("forerun.") and prose.is_file()):
            return text
        first, *rest = text.split("\n\n", 1)
        return "\n\n".join([first, prose.read_text("utf-8").rstrip(), *rest])

    @property
    def bibtex(self) -> str:
        own = str(getattr(self.cls, "bibtex", ""))
        return own if "@" in own else "\n".join(BIBTEX[key] for key in own.split())


def _literal(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    # Text that a spec would not read as one word needs its quotes.
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.+/-]*", value)
    return value if plain else repr(value)


def registry(kind: str) -> Registry:
    """The registry of a kind; loading it may take a second (torch)."""
    named: Registry = getattr(import_module(f"forerun.{kind}"), kind.upper())
    return named


def cards(kind: str) -> list[Card]:
    """All parts of a kind, in registry order."""
    registered = registry(kind)
    return [Card(kind, name, registered.load(name)) for name in registered.names()]


def find(name: str) -> list[Card]:
    """The parts of that name (a spec names its part)."""
    part = parse(name).name
    kinds = [kind for kind in KINDS if part in registry(kind)]
    if not kinds:
        names = {n for kind in KINDS for n in registry(kind).names()}  # cm-asd is two things
        raise UnknownNameError.among("controller, rule or drafter", part, names)
    return [Card(kind, part, registry(kind).load(part)) for kind in kinds]


def names_in(spec: str | Spec) -> Iterator[str]:
    """All part names in a spec, from the outside in: ``bounded(gammatune)`` names two."""
    spec = parse(spec) if isinstance(spec, str) else spec
    yield spec.name
    for value in (*spec.args, *spec.kwargs.values()):
        if isinstance(value, Spec):
            yield from names_in(value)


WIDE = 400  # columns where output is piped, so that lines are never wrapped

ROOMY = 130  # columns from which settings and papers fit beside the rest


def show(
    what: Annotated[
        str | None, typer.Argument(metavar="[controllers|rules|drafters|models]")
    ] = None,
) -> None:
    """List what is available, one line each."""
    kinds = (*KINDS, "models")
    if what is not None and what not in kinds:
        raise UnknownNameError.among("list", what, kinds)
    console = stdout()
    brief = console.is_terminal and console.width < ROOMY
    for i, kind in enumerate([what] if what else kinds):
        if i:
            console.print()
        made = _models() if kind == "models" else _parts(kind, brief)
        if console.is_terminal:
            console.print(made)
        else:
            for line in Console(width=WIDE).render_lines(made, pad=False):
                print("".join(part.text for part in line).rstrip())
    if brief and what != "models":
        console.print(Text("\nforerun info NAME shows a part's settings and its paper.", "dim"))


def _table(title: str, *columns: str) -> Table:
    made = table(*columns)
    made.title, made.title_justify = Text(title, "bold"), "left"
    return made


def _parts(kind: str, brief: bool) -> Table:
    rules = kind == "rules"
    columns = ["name", *(["output"] if rules else []), "what"]
    columns += [] if brief else ["settings", "paper"]
    made = _table(f"{kind}: {QUESTIONS[kind]}", *columns)
    made.columns[0].no_wrap = True
    for card in cards(kind):
        output = Text("lossless", "green") if card.lossless else Text("lossy", "yellow")
        row = [Text(card.name, "bold"), *([output] if rules else []), Text(card.summary)]
        if not brief:
            row += [Text(card.signature or "–", "cyan"), Text(card.paper or "–", "dim")]
        made.add_row(*row)
    return made


def _models() -> Table:
    from forerun import zoo
    from forerun.runtime.support import PROVEN, PROVEN_ENCODER_DECODER

    title = "models: any Hugging Face model with full attention that writes text"
    made = _table(title, "name", "what")
    lines = {"(shipped target)": _shipped(zoo.TARGET), "(shipped draft)": _shipped(zoo.DRAFT)}
    lines |= {name: _shipped(folder, name) for name, folder in zoo.NAMES.items()}
    lines |= dict.fromkeys(sorted(PROVEN), "architecture tested row by row")
    lines |= dict.fromkeys(sorted(PROVEN_ENCODER_DECODER), "encoder-decoder, likewise")
    for name, line in lines.items():
        made.add_row(Text(name, "bold"), Text(line))
    return made


def _shipped(folder: Path, name: str = "") -> str:
    """A line about a model that ships; `name` is that of one with an encoder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "not in this copy"
    if not name:
        return (
            f"{config['model_type']}, {config['num_hidden_layers']} layers, hidden "
            f"{config['hidden_size']}, vocabulary {config['vocab_size']}, "
            f"context {config['max_position_embeddings']}; used when no --target is given"
        )
    task = {"translator": "English to German", "digest": "made-up passages to one line"}[name]
    return (
        f"{config['model_type']}, {config['encoder_layers']} + {config['decoder_layers']} layers, "
        f"width {config['d_model']}, vocabulary {config['vocab_size']}; ships, {task}: "
        f"--target {name}"
    )


@options.command
def info(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    target: Annotated[str | None, options.option("MODEL")] = None,
) -> None:
    """Show the full card of a part: what it does, when it helps, every setting.

    Args:
        name: a controller, rule or drafter.
        target: instead, what would be loaded for this model.
    """
    console = stdout()
    if (name is None) == (target is None):
        raise SettingError("give the name of a part, or --target MODEL")
    if target is not None:
        from forerun.runtime.preview import preview
        from forerun.zoo import locate

        for fact in preview(locate(target)):
            console.print(fact, soft_wrap=True, highlight=False)
        return
    assert name is not None
    cards = find(name)
    if len(cards) > 1:
        kinds = " and a ".join(card.kind.removesuffix("s") for card in cards)
        console.print(Text(f"{cards[0].name} is a {kinds}; both follow.\n", "dim"))
    for i, card in enumerate(cards):
        if i:
            console.print()
        for line in card_lines(card, console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)


def card_lines(card: Card, width: int | None = None) -> list[Text]:
    """The card as lines of text, wrapped between words if there is a width."""
    spec = f"{card.name}({card.signature})" if card.signature else card.name
    lines = [Text.assemble((card.name, "bold"), f"  ({card.kind.removesuffix('s')})")]
    lines += [Text(card.summary), Text()]
    lines += [*(Text(line, "cyan") for line in _wrap(spec, width, hang=4)), Text()]
    if card.lossless is not None:
        word = "lossless: the output has exactly the target's distribution"
        lines += [Text(word if card.lossless else "lossy: the output may differ"), Text()]
    lines += [Text(line) for block in _blocks(card.doc) for line in _wrap(block, width)]
    if card.bibtex:
        lines += [Text(), Text(f"BibTeX: forerun cite '{card.name}'", "dim")]
    return lines


_SETTING = re.compile(r" +\w+: ")
_APART = re.compile(r"\s*(>>>|\.\.\.|[-*] |\w+:$|$)")  # lines that stand by themselves


def _blocks(doc: str) -> list[str]:
    """Paragraphs and settings of a docstring, each with its lines as they stand."""
    blocks: list[list[str]] = []
    for line in doc.splitlines():
        last = blocks[-1] if blocks else None
        new = last is None or _APART.match(line) or _APART.match(last[0]) or _SETTING.match(line)
        if last is None or new:
            blocks.append([line])
        else:
            last.append(line)
    return ["\n".join(block) for block in blocks]


def _wrap(block: str, width: int | None, hang: int = 0) -> list[str]:
    """Lines of a block; one that is too wide anywhere is filled anew."""
    lines = block.split("\n")
    if width is None or max(map(len, lines)) <= width or lines[0].lstrip().startswith(">>>"):
        return lines
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    hang += 4 if _SETTING.match(lines[0]) else 0
    return textwrap.wrap(
        " ".join(line.strip() for line in lines),
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


@options.command
def cite(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Print BibTeX of the papers behind parts.

    Args:
        names: parts or specs, like bounded(gammatune+,high=8).
    """
    entries: dict[str, None] = {}
    for text in names:
        if text in BIBTEX:
            entries[BIBTEX[text].strip()] = None
            continue
        for name in names_in(text):
            entries_of = [card.bibtex.strip() for card in find(name)]
            if not any(entries_of):
                print(f"{name}: no paper to cite", file=sys.stderr)
            for bibtex in filter(None, entries_of):
                entries |= dict.fromkeys(_split(bibtex))
    if entries:
        typer.echo("\n\n".join(entries))


def _split(bibtex: str) -> list[str]:
    """Single entries, so that a shared one is printed once."""
    return [f"@{entry.strip()}" for entry in f"\n{bibtex}".split("\n@") if entry.strip()]
