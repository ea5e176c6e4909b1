"""Names for parts, the same everywhere: ``gammatune(eta=0.3,delta=2)``.

A *spec* is a registered name with optional settings. Settings are Python-like literals or specs
themselves, so wrappers nest: ``bounded(gammatune+(eta=0.3), low=1, high=8)``. Entries are lazy;
ours are what `methods` describes, third parties add theirs by the entry points
``forerun.controllers``, ``forerun.rules`` and ``forerun.drafters``.
"""

import importlib
import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from forerun.errors import SettingError, UnknownNameError


@dataclass(frozen=True)
class Spec:
    """A parsed spec: a name with positional and named settings."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [_literal(a) for a in self.args]
        parts += [f"{key}={_literal(value)}" for key, value in self.kwargs.items()]
        return f"{self.name}({','.join(parts)})" if parts else self.name


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, Spec) else repr(value)


_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<number>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w.]))"
    r"|(?P<name>[A-Za-z_][\w.+/-]*)|(?P<mark>[(),=]))"
)
# What `repr` writes in a text.
_ESCAPE = re.compile(
    r"\\(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U00(?:0[\da-fA-F]|10)[\da-fA-F]{4}|.)", re.DOTALL
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_CITED = re.compile(r"([\w-]+(?: et al\.| and [\w-]+)? \d{4}(?: \([^()]*\))?) \[(\w+)\]")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf}
_WORDS |= {str(value): value for value in _WORDS.values()}
WORDS = re.compile(r"(typing\.|Optional\[|Annotated\[)*(str|<class 'str'|Literal)")
"""How types of settings that are text begin."""
Tokens = deque[tuple[str, str]]  # kinds and texts of what is not read yet


def parse(text: str) -> Spec:
    """Read a spec.

    >>> parse("bounded(gammatune+(eta=0.3), high=8)").kwargs
    {'high': 8}

    Raises:
        SettingError: the text is not a spec; the place is named.
    """
    tokens: Tokens = deque()
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if not match:
            raise SettingError(f"cannot read {text!r} at {text[at:]!r}; write NAME or NAME(key=1)")
        kind = match.lastgroup or ""
        tokens.append((kind, match.group(kind)))
        at = match.end()
    spec = _spec(tokens, text)
    if tokens:
        raise SettingError(f"cannot read {text!r} after {spec}: there is {tokens[0][1]!r}")
    return spec


def _took(tokens: Tokens, mark: str) -> bool:
    """Whether the next token is this one, which is taken away then."""
    return bool(tokens) and tokens[0][1] == mark and bool(tokens.popleft())


def _spec(tokens: Tokens, text: str) -> Spec:
    if not tokens or tokens[0][0] != "name":
        raise SettingError(f"expected a name in {text!r}; write NAME or NAME(key=1)")
    name = tokens.popleft()[1]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    closed = not _took(tokens, "(") or _took(tokens, ")")
    while not closed:
        if len(tokens) > 1 and tokens[0][0] == "name" and tokens[1][1] == "=":
            key = tokens.popleft()[1]
            tokens.popleft()
            if key in kwargs:
                raise SettingError(f"in {text!r} the setting {key!r} is given twice")
            kwargs[key] = _value(tokens, text)
        elif kwargs:
            raise SettingError(f"in {text!r} an unnamed setting follows a named one")
        else:
            args.append(_value(tokens, text))
        more = _took(tokens, ",")
        closed = _took(tokens, ")")
        if not (more or closed):
            raise SettingError(f"missing ')' in {text!r}")
    return Spec(name, tuple(args), kwargs)


def _value(tokens: Tokens, text: str) -> Any:
    if not tokens:
        raise SettingError(f"missing value at the end of {text!r}")
    kind, word = tokens[0]
    if kind not in ("string", "number"):
        called = len(tokens) > 1 and tokens[1][1] == "("
        spec = _spec(tokens, text)
        return spec if called else _WORDS.get(word, spec)
    tokens.popleft()
    if kind == "string":
        return _ESCAPE.sub(_unescaped, word[1:-1])
    return (int if word.lstrip("+-").isdecimal() else float)(word)


def _unescaped(match: re.Match[str]) -> str:
    # `ast.literal_eval` is not safe in threads before Python 3.13.
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROLS.get(code, code)


def described(kind: str) -> dict[str, str]:
    """The modules of all methods of a kind, by name: of each there is a text in `methods`, and in
    the package of the kind a module of its name, with `_` for "-" and `_plus` for "+"."""
    texts = files("forerun").joinpath("methods", kind).iterdir()
    names = sorted(text.name.removesuffix(".md") for text in texts)
    return {n: f"forerun.{kind}.{n.replace('-', '_').replace('+', '_plus')}" for n in names}


def summary_of(cls: type[Any]) -> str:
    """One line on a method: its `summary`, or how its module begins, behind the name if any."""
    first = (sys.modules[cls.__module__].__doc__ or "").partition("\n\n")[0]
    line = " ".join(first.split()).rpartition("`: ")[2]
    return str(getattr(cls, "summary", "") or line.removesuffix("."))


def papers_of(cls: type[Any]) -> dict[str, str]:
    """The papers behind a method: what its docstring says before each key of `citations.bib`."""
    cited = _CITED.findall(" ".join((cls.__doc__ or "").split()))
    return {key: paper for paper, key in cited}


class Registry:
    """Lazy table from names to dataclasses, e.g. all controllers. An entry is ``module:Class``, or
    a module whose last class of the kind it is."""

    def __init__(
        self, kind: str, group: str, entries: Mapping[str, str], base: type[Any] | None = None
    ) -> None:
        self.kind = kind
        self._base = base
        self._group = group
        self._entries = dict(entries)
        self._plugins: dict[str, Any] | None = None

    def names(self) -> list[str]:
        """All registered names, ours first."""
        if self._plugins is None:
            self._plugins = {e.name: e for e in entry_points(group=self._group)}
        return [*self._entries, *sorted(set(self._plugins) - set(self._entries))]

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def load(self, name: str) -> type[Any]:
        """The class behind a name; `UnknownNameError` with a hint if there is none."""
        if name not in self.names():
            raise UnknownNameError.among(self.kind, name, self.names())
        if name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            parts = vars(importlib.import_module(module))
            return parts[attribute] if attribute else self._last(parts)
        assert self._plugins is not None
        return self._plugins[name].load()

    def _last(self, parts: Mapping[str, Any]) -> type[Any]:
        own = [c for c in parts.values() if getattr(c, "__module__", "") == parts["__name__"]]
        return [c for c in own if isinstance(c, type) and issubclass(c, self._base or object)][-1]

    def make(self, spec: Any) -> Any:
        """Build from text, a `Spec`, or pass an instance through.

        Raises:
            UnknownNameError: a name or a key is not known.
            SettingError: the text cannot be read, or a setting is refused.
        """
        if isinstance(spec, str):
            spec = parse(spec)
        if not isinstance(spec, Spec):
            if self._base and not isinstance(spec, self._base):
                expected = f"text or an instance of {self._base.__name__}"
                raise SettingError(f"a {self.kind} must be {expected}, got {spec!r}")
            return spec
        cls = self.load(spec.name)
        known = {f.name: f for f in fields(cls) if f.init}
        names = list(known)
        for key in spec.kwargs:
            if key not in names:
                raise UnknownNameError.among(f"setting of {self.kind} {spec.name!r}", key, names)
        unnamed = [key for key, f in known.items() if not f.kw_only]
        if len(spec.args) > len(unnamed):
            most = f"{spec.name!r} takes at most {len(unnamed)} settings without their names"
            raise SettingError(f"{most}, got {spec}")
        values = dict(zip(unnamed, spec.args, strict=False))
        if twice := values.keys() & spec.kwargs.keys():
            raise SettingError(f"{spec.name!r} got {sorted(twice)[0]!r} twice in {spec}")
        values.update(spec.kwargs)
        for key, f in known.items():
            if key not in values and f.default is MISSING and f.default_factory is MISSING:
                raise SettingError(f"{spec.name!r} needs {key!r}; write {spec.name}({key}=...)")
            if isinstance(value := values.get(key), Spec):  # text without quotes, or a part
                values[key] = str(value) if WORDS.match(str(f.type)) else self.make(value)
        try:
            return cls(**values)
        except TypeError as error:
            raise SettingError(f"cannot build {spec}: {error}") from error

    def text(self, part: Any) -> str:
        """The spec of an instance, with only the settings that differ from their defaults."""
        module = type(part).__module__
        for name in self.names():
            place, _, _ = self._entries.get(name, module).partition(":")
            if place == module and self.load(name) is type(part):
                break
        else:
            return repr(part)
        changed = {}
        for f in fields(part):
            value = getattr(part, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if f.init and f.repr and value != default:
                changed[f.name] = parse(self.text(value)) if is_dataclass(value) else value
        return str(Spec(name, (), changed))
