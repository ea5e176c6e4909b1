"""`forerun list`, `info`, `cite` and `zoo`: what is available, and of whom."""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from importlib.resources import files
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import stdout, table
from forerun.errors import SettingError, UnknownNameError
from forerun.registry import Registry, Spec, papers_of, parse, summary_of
from forerun.zoo import card as model_card

app = options.group("The models that ship: the model card.")
MOVED = (
    "train", "translator", "pairs", "bleu", "finish", "average", "distill", "curves", "evaluate",
    "prompts",
)  # fmt: skip
"""Commands of the recipe, which is in the repository and not in the package."""
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
        return summary_of(self.cls)

    @property
    def paper(self) -> str:
        return "; ".join(papers_of(self.cls).values())

    @property
    def lossless(self) -> bool | None:
        """Of a rule; None for others, which cannot change the output."""
        return bool(self.cls.lossless) if self.kind == "rules" else None

    @property
    def settings(self) -> list[tuple[str, str | None]]:
        """Names and defaults, in the order in which they may go unnamed; None: it must be given."""
        if not is_dataclass(self.cls):
            return []
        out: list[tuple[str, str | None]] = []
        for f in sorted(fields(self.cls), key=lambda f: bool(f.kw_only)):
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
        text = _described(self.cls, dict(self.settings)) or self.summary
        prose = files("forerun").joinpath("methods", self.kind, f"{self.name}.md")
        if not (self.cls.__module__.startswith("forerun.") and prose.is_file()):
            return text
        first, *rest = text.split("\n\n", 1)
        return "\n\n".join([first, prose.read_text("utf-8").rstrip(), *rest])

    @property
    def bibtex(self) -> str:
        own = str(getattr(self.cls, "bibtex", ""))
        return own or "\n".join(BIBTEX[key] for key in papers_of(self.cls) if key in BIBTEX)


_SETTING = re.compile(r"^    (\w+): .*(?:\n {8,}.*)*", re.MULTILINE)


def _described(cls: type[Any], settings: Iterable[str]) -> str:
    """A docstring, with what bases say of settings that it leaves to them."""
    own, *others = (inspect.getdoc(part) or "" for part in cls.__mro__)
    parts = [text.partition("Args:\n")[2].partition("\n\n")[0] for text in (*others[::-1], own)]
    known = {match[1]: match[0] for part in parts for match in _SETTING.finditer(part)}
    theirs = [known[name] for name in settings if known.get(name, own) not in own]
    if theirs and "Args:\n" in own:
        return own.replace("Args:", "\n".join(["Args:", *theirs]), 1)
    first, *rest = own.split("\n\n", 1)
    return "\n\n".join([first, "\n".join(["Args:", *theirs]), *rest]) if theirs else own


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
    known = {kind: registry(kind) for kind in KINDS}
    if named := [Card(k, part, own.load(part)) for k, own in known.items() if part in own]:
        return named
    names = {n for own in known.values() for n in own.names()}  # cm-asd is two things
    raise UnknownNameError.among("controller, rule or drafter", part, names)


def names_in(spec: str | Spec) -> Iterator[str]:
    """All part names in a spec, from the outside in: ``bounded(gammatune)`` names two."""
    spec = parse(spec) if isinstance(spec, str) else spec
    yield spec.name
    for value in (*spec.args, *spec.kwargs.values()):
        if isinstance(value, Spec):
            yield from names_in(value)


WIDE = 400  # columns where output is piped, so that lines are never wrapped

SHIPPED = {
    "(shipped target)": "runs when no --target is given",
    "(shipped draft)": "runs ahead of it",
    "translator": "ships: English to German, by --target translator",
    "digest": "ships: made-up passages to one line, by --target digest",
}
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
    from forerun.runtime.support import PROVEN, PROVEN_ENCODER_DECODER

    title = "models: any Hugging Face model with full attention that writes text"
    made = _table(title, "name", "what")
    lines = SHIPPED | dict.fromkeys(sorted(PROVEN), "architecture tested row by row")
    lines |= dict.fromkeys(sorted(PROVEN_ENCODER_DECODER), "encoder-decoder, likewise")
    for name, line in lines.items():
        made.add_row(Text(name, "bold"), Text(line))
    return made


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
    lines += [*(Text(line, "cyan") for line in _wrapped(spec, width)), Text()]
    if card.lossless is not None:
        word = "lossless: the output has exactly the target's distribution"
        lines += [Text(word if card.lossless else "lossy: the output may differ"), Text()]
    lines += map(Text, _filled(card.doc, width))
    if card.bibtex:
        lines += [Text(), Text(f"BibTeX: forerun cite '{card.name}'", "dim")]
    return lines


_GOES_ON = re.compile(r"(?<=\S)\n(?! *(?:[-*] |\w+:(?: |$))) *", re.MULTILINE)
"""Ends of lines whose sentence goes on: what follows is no list and no setting."""


def _filled(doc: str, width: int | None) -> Iterator[str]:
    """Lines of a docstring, filled anew if there is a width; examples stay as they are."""
    for number, part in enumerate(doc.split("\n\n")):
        if number:
            yield ""
        if width is None or ">>>" in part:
            yield from part.split("\n")
            continue
        for line in _GOES_ON.sub(" ", part).split("\n"):
            hang = len(line) - len(line.lstrip()) + 4 * bool(re.match(r" +\w+: ", line))
            yield from _wrapped(line, width, hang)


def _wrapped(line: str, width: int | None, hang: int = 4) -> list[str]:
    """A line in pieces that fit, cut between words, the later ones indented."""
    if width is None:
        return [line]
    return textwrap.wrap(
        line, max(width, 20), subsequent_indent=" " * hang,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


@options.command
def cite(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Print BibTeX of the papers behind parts.

    Args:
        names: parts or specs, like bounded(gammatune+,high=8).
    """
    entries: dict[str, None] = {}
    for text in names:
        for name in [text] if text in BIBTEX else names_in(text):
            papers = BIBTEX.get(name) or "\n".join(card.bibtex for card in find(name))
            single = [entry.strip() for entry in f"\n{papers}".split("\n@")]
            if not any(single):
                print(f"{name}: no paper to cite", file=sys.stderr)
            entries |= {f"@{entry}": None for entry in single if entry}  # a shared one once
    if entries:
        typer.echo("\n\n".join(entries))


@app.command("card")
def model() -> None:
    """Print the model card: data, licences, losses, metrics, samples."""
    typer.echo(model_card().rstrip("\n"))


def _moved(context: typer.Context) -> None:
    name = context.info_name
    raise SettingError(
        f"`zoo {name}` is `python -m recipes {name}` now, from the root of forerun's repository"
    )


for _name in MOVED:
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(_name, hidden=True, context_settings=anything)(_moved)
