"""Options that several commands have: one name, one meaning, one text.

A parameter of a command may stand for the fields of a dataclass, an option each (`Fields`): what a
library calls a setting is declared there and nowhere else. The help of other options stands under
"Args" in the docstring of their command, as that of fields in the docstring of their class.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from forerun.checks import Bytes, size
from forerun.errors import SettingError, require

T = TypeVar("T")

MODELS = "Models"
SPECULATION = "Speculation"
PROMPTS = "Prompts"
SAMPLING = "Sampling"
COSTS = "Costs"
OUTPUT = "Output"
VALIDATION = "The shipped ones are those of split val. Default for the shipped target: builtin."
"""More about the prompts of commands that choose settings."""


def option(metavar: str, help: str = "", *names: str, panel: str | None = None) -> Any:
    """An option with a value, named like its parameter; its help is what the docstring says."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


def flag(name: str, help: str = "", panel: str | None = None) -> Any:
    """An option that is there or not."""
    return option("", help, name, panel=panel)


class Fields:
    """Marks a parameter that stands for fields of a dataclass: each becomes an option.

    Help is the first sentence of a field's text in the docstring, or what `Annotated` says; in
    brackets behind the field's name may stand the flag, where that is another, and what stands for
    the value. The command gets an object of the class, or a dictionary if the parameter is one.

    Args:
        source: the dataclass.
        panel: of the options that do not name one; that of the class unless given.
        only: the fields, in this order; None takes all.
        without: fields that are no options here.
        optional: what is not given is None, whatever the field's default.
        changed: fields with another option here: an `Annotated` type, or (type, default).
    """

    def __init__(
        self,
        source: type[Any],
        panel: str | None = None,
        only: tuple[str, ...] | None = None,
        without: tuple[str, ...] = (),
        optional: bool = False,
        **changed: Any,
    ) -> None:
        self.source, self.changed = source, changed
        self.panel = panel or getattr(source, "panel", None)
        self._optional, self.sizes = optional, set[str]()
        known = [f.name for f in fields(source) if f.init]
        self.names = [n for n in only or known if n not in without]

    def parameters(self) -> list[inspect.Parameter]:
        """The options, as parameters of a function."""
        hints, texts = get_type_hints(self.source, include_extras=True), _texts_of(self.source)
        by_name = {f.name: f for f in fields(self.source)}
        out = []
        for name in self.names:
            made = by_name[name]
            default: Any = made.default
            if default in (MISSING, (), {}, frozenset()):  # nothing instead of something empty
                default = None
            kind, (words, text) = self.changed.get(name, hints[name]), texts.get(name, ([], ""))
            if self._optional:
                kind, default = kind | None, None
            if isinstance(kind, tuple):
                kind, default = kind
            if Bytes in (kind, *get_args(kind)):
                kind = Annotated[str | None, option("SIZE", text, panel=self.panel)]
                if default is not None:
                    binary = default % 2**20 == 0
                    default = f"{default >> 20}MiB" if binary else f"{default // 10**6}MB"
                self.sizes.add(name)
            if get_origin(kind) is not Annotated:
                kind = _option(name, kind, words, text, self.panel)
            keyword = inspect.Parameter.KEYWORD_ONLY
            out.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
        return out


def _option(name: str, kind: Any, words: list[str], text: str, panel: str | None) -> Any:
    if kind is bool:
        return Annotated[bool, flag(f"--{name.replace('_', '-')}", text, panel)]
    several = get_origin(kind) in (tuple, frozenset, Mapping)
    single = next((k for k in get_args(kind) or (kind,) if k is not type(None)), str)
    flags = [word for word in words if word.startswith("--")]
    usual = {int: "N", float: "X"}.get(single, "TEXT")
    metavar, *_ = [*(word for word in words if word not in flags), usual]
    if several:
        kind, text = list[str] | None, f"{text[:-1]}; repeatable."
    return Annotated[kind, option(metavar, text, *flags, panel=panel)]


def _texts_of(source: type[Any]) -> dict[str, tuple[list[str], str]]:
    """`arguments` with the first sentence about each, of its bases, too."""
    texts: dict[str, tuple[list[str], str]] = {}
    for part in reversed(source.__mro__):
        texts |= arguments(part.__doc__)
    first = re.compile(r"(?<=\.) (?=[A-Z])")
    return {name: (words, first.split(text)[0]) for name, (words, text) in texts.items()}


def arguments(doc: str | None) -> dict[str, tuple[list[str], str]]:
    """What a docstring says about every argument: words in brackets behind its name, and a text,
    begun with a capital."""
    about = inspect.cleandoc(doc or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {8,}.*)*)", about, re.MULTILINE)
    return {
        name: (words.split(), " ".join((text[0].upper() + text[1:]).split()))
        for name, words, text in texts
    }


def command(function: Callable[..., T]) -> Callable[..., T]:
    """A command with an option per field of what `Fields` marks, and its docstring's help."""
    groups: dict[str, tuple[Fields, bool]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(function, include_extras=True)
    texts = arguments(function.__doc__)
    for name, parameter in inspect.signature(function).parameters.items():
        mark: Any = next(iter(getattr(hints[name], "__metadata__", ())), None)
        if isinstance(mark, Fields):
            groups[name] = mark, is_dataclass(get_args(hints[name])[0])
            parameters += mark.parameters()
        else:
            if name in texts:
                mark.help = texts[name][1]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=keyword, annotation=hints[name]))

    @wraps(function)
    def run(**given: Any) -> T:
        for name, (mark, whole) in groups.items():
            values = {field: given.pop(field) for field in mark.names}
            for field in mark.sizes:
                values[field] = None if values[field] is None else size(values[field])
            given[name] = mark.source(**values) if whole else values
        return function(**given)

    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    optional = [p for p in parameters if p.default is not inspect.Parameter.empty]
    run.__signature__ = inspect.Signature([*required, *optional])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    run.__doc__ = (function.__doc__ or "").partition("\n\n    Args:")[0]
    return run


def group(help: str) -> typer.Typer:
    """Commands of one name, which alone prints their help."""
    app = typer.Typer(help=help, no_args_is_help=False)

    @app.callback(invoke_without_command=True)
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `Sampling` as its fields, checked; what is None is left to its default."""
    from forerun.requests import Sampling

    values = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in values:
        values["logit_bias"] = dict(map(_bias, values["logit_bias"]))
    Sampling.of(values)
    return values


def _bias(pair: str) -> tuple[int, float]:
    """``ID=VALUE``, e.g. ``"12=-5"`` or ``"7=-inf"``."""
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise SettingError(f"--logit-bias wants ID=VALUE like 12=-5, got {pair!r}") from error


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers ≥ 1 separated by commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part.isdecimal() and int(part) >= 1 for part in parts)
    require(good, name, text, "whole numbers from 1 on, separated by commas")
    return list(dict.fromkeys(int(part) for part in parts))


def output(metavar: str, help: str = "") -> Any:
    """Where a result goes."""
    return option(metavar, help, "-o", "--output", panel=OUTPUT)


def prompts(more: str = "") -> Any:
    """The prompts of a lab command, as `forerun.prompts.find_prompts` takes them."""
    text = "A file as for generate --prompt-file (- reads stdin), or the shipped prompts of one "
    text += f"family or, with builtin alone, of all. {more}"
    return option("FILE|builtin:FAMILY", text.strip(), panel=PROMPTS)


def limit(more: str = "") -> Any:
    """How many prompts."""
    text = f"Only the first N prompts of each family; a file is one if its lines name none. {more}"
    return option("N", text.strip(), panel=PROMPTS)


Remember = Annotated[
    bool | None,
    typer.Option(
        "--remember/--no-remember",
        help="Whether the draft memory learns from what the target writes and keeps it in the "
        "cache for later runs; output stays the same, speed may not. Default: yes, but no for "
        "serve with several API keys and for generate --compare.",
        rich_help_panel=SPECULATION,
    ),
]
DraftModel = Annotated[
    str | None,
    option(
        "ID_OR_PATH",
        "Its draft model. Default: the shipped draft for the shipped target.",
        panel=MODELS,
    ),
]

Split = Annotated[
    str,
    option(
        "val|test", "Of the shipped prompts: val to develop on, test to report on.", panel=PROMPTS
    ),
]
Limit = Annotated[int | None, limit()]
MaxNewTokens = Annotated[
    int, option("N", "Most tokens to write; less where a prompt asks for less.", panel=PROMPTS)
]
OwnMaxNewTokens = Annotated[
    int | None,
    option("N", "Most tokens per prompt. Default: as the prompt says, or 128.", panel=PROMPTS),
]

CostTable = Annotated[
    str,
    option(
        "FILE|c=10,slope=0.02",
        "What a round costs: a file of forerun costs, or made up: c draft steps per target pass, "
        "slope, fixed and tree in target passes.",
        panel=COSTS,
    ),
]
NearBatch = Annotated[int, option("B", "Choose the costs nearest to this batch.", panel=COSTS)]
NearContext = Annotated[int, option("N", "And of those nearest to this context.", panel=COSTS)]

Rounds = Annotated[bool, flag("--rounds", "Print one line per round.", OUTPUT)]
Json = Annotated[bool, flag("--json", "Print one JSON document and nothing else.", OUTPUT)]
