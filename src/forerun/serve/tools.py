"""Functions that a model may call: what a request offers, the grammar of it, and reading calls.

A call is written as the model's own template writes calls (`chat.CallFormat`), its arguments held
to the function's schema.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.chat import CallFormat
from forerun.engine.text import begun
from forerun.serve.errors import bad, unsupported
from forerun.serve.protocol import ChatRequest, NamedTool
from forerun.serve.structure import asked

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # Mistral's templates refuse other ids
AS_TEMPLATES_WRITE: Any = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "
}  # fmt: skip
"""JSON as `tojson` writes it: what models were trained to write."""
TEXT = r"/(?s:.*)/"
NO_ARGUMENTS: Any = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Calling:
    """Calls that an answer may hold."""

    format: CallFormat
    schemas: Mapping[str, Any]  # of the arguments, by the name of the function
    required: bool  # whether the answer is a call
    parallel: bool  # whether it may hold several
    listed: list[dict[str, Any]]  # the functions as the template is given them
    added: Mapping[str, int]  # token ids of the tokenizer's added tokens, by their text

    @property
    def marks(self) -> dict[int, str]:
        """Added tokens of the format: special ones show as no text."""
        form = self.format
        written = form.begin + (form.between or "") + form.end
        return {token: name for name, token in self.added.items() if name in written}

    def grammar(self) -> str:
        """Of the answer, in llguidance's dialect of Lark."""
        form, names = self.format, list(self.schemas)
        calls = [
            f"call_{i}: {json.dumps(form.head(name))} %json "
            f"{json.dumps({**self.schemas[name], 'x-guidance': AS_TEMPLATES_WRITE})} "
            f"{json.dumps(form.close)}"
            for i, name in enumerate(names)
        ]
        more = form.between is not None and self.parallel
        several = f"( {self._literal(form.between or '')} call )*" if more else ""
        lines = [
            "%llguidance {}",
            *calls,
            "call: " + " | ".join(f"call_{i}" for i in range(len(names))),
            f"calls: call {several} {self._literal(form.end)}",
        ]
        if self.required:
            lines.append(f"start: {self._literal(form.begin)} calls")
        elif not form.begin:  # then what begins like a call is one
            lines += ["start: TEXT | calls", r"TEXT: /([^{](?s:.*))?/"]
        else:
            opening = re.split("(\n)", form.begin, maxsplit=1)[0]
            lines += [
                "start: TEXT | before calls",
                f"before: TEXT {self._literal(form.begin)}"
                f" | letters {self._literal(form.begin[len(opening) :])}",
                f"letters[lazy]: TEXT {json.dumps(opening)}",
                f"TEXT: {TEXT}",
            ]
        return "\n".join(lines)

    def _literal(self, text: str) -> str:
        """A fixed text: added tokens by their ids, as the tokenizer writes them."""
        names = sorted(self.marks.values(), key=len, reverse=True)
        parts = re.split("|".join(f"({re.escape(name)})" for name in names), text)
        return " ".join(
            f"<[{self.added[part]}]>" if part in self.added else json.dumps(part)
            for part in parts
            if part
        )


def calling(
    request: ChatRequest, form: CallFormat | None, added: Mapping[str, int]
) -> Calling | None:
    """What a request lets the model call; None for nothing.

    Raises:
        ApiError: 400 for a choice that is none of the tools; 501 for tools that are no functions,
            or where the template writes no calls.
    """
    if form is None and any(turn.role == "tool" or turn.tool_calls for turn in request.messages):
        raise unsupported(
            "tools' messages with a chat template that writes no calls are", "messages"
        )
    mode, names = _choice(request)
    if not request.tools:
        if mode == "required":
            raise bad("tool_choice needs tools", "tool_choice")
        return None
    if mode == "none":
        return None
    if form is None:
        raise unsupported("tools with a chat template that writes no calls as JSON are", "tools")
    listed, schemas = [], {}
    for tool in request.tools:
        if tool.type != "function" or tool.function is None:
            raise unsupported(f"tools of type {tool.type!r} are", "tools")
        listed.append(tool.model_dump(exclude_none=True))
        schemas[tool.function.name] = tool.function.parameters or NO_ARGUMENTS
    if len(schemas) < len(listed):
        raise bad("two tools have the same name", "tools")
    if others := asked(request):
        raise bad(f"give tools or {others[0][0]}, not both", others[0][0])
    for name in names or ():
        if name not in schemas:
            raise bad(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
    schemas = {name: schemas[name] for name in names or schemas}
    several = request.parallel_tool_calls is not False
    several &= not isinstance(request.tool_choice, NamedTool)
    return Calling(form, schemas, mode == "required", several, listed, added)


def _choice(request: ChatRequest) -> tuple[str, list[str] | None]:
    """Whether a call may, must or must not come, and of which functions; None: of any."""
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        return choice, None
    if isinstance(choice, NamedTool):
        return "required", [choice.function.name]
    allowed = choice.allowed_tools
    return allowed.mode, [tool.function.name for tool in allowed.tools]


@dataclass
class Call:
    """A call while it is read."""

    index: int
    name: str
    arguments: str = ""
    id: str = field(
        default_factory=lambda: "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    )

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Delta = str | tuple[Call, str]  # more text, or of a call's arguments; none where it begins


class CallReader:
    """Takes an answer apart while it grows: its text, and the calls in it."""

    def __init__(self, calling: Calling) -> None:
        form, heads = calling.format, {calling.format.head(name): name for name in calling.schemas}
        self.calls: list[Call] = []
        self._anywhere = bool(form.begin)
        self._first = {form.begin + head: name for head, name in heads.items()}
        self._next = {}
        if form.between is not None:
            self._next = {form.close + form.between + head: heads[head] for head in heads}
        self._read, self._rest, self._texts = self._text, "", False
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str, done: bool = False) -> Iterator[Delta]:
        """What a further part of the answer adds; `done` with the last one."""
        self._rest += text
        before = None
        while before != (before := (self._read, self._rest)):
            yield from self._read()
        if done and not self.calls and self._rest:
            yield self._rest

    def _text(self) -> Iterator[Delta]:
        """Up to a call, or to what may be the beginning of one."""
        rest, openings = self._rest, self._first
        places = [(at, opening) for opening in openings if (at := rest.find(opening)) >= 0]
        if self._anywhere:
            held = begun(rest, openings)
        else:  # a call is at the beginning, or there is none
            places = [place for place in places if not (place[0] or self._texts)]
            begins = any(opening.startswith(rest) for opening in openings)
            held = len(rest) if begins and not self._texts else 0
        at, opening = min(places, default=(len(rest) - held, ""))
        self._rest = rest[at + len(opening) :]
        if at:
            self._texts = True
            yield rest[:at]
        if opening:
            yield self._begin(openings[opening])

    def _begin(self, name: str) -> Delta:
        self._read = self._arguments
        self.calls.append(Call(len(self.calls), name))
        return self.calls[-1], ""

    def _arguments(self) -> Iterator[Delta]:
        """Up to the end of the object."""
        end = len(self._rest)
        for at, letter in enumerate(self._rest):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                continue
            self._quoted = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if letter in "}]" and not self._depth:
                self._read, end = self._close, at + 1
                break
        new, self._rest = self._rest[:end], self._rest[end:]
        if new:
            self.calls[-1].arguments += new
            yield self.calls[-1], new

    def _close(self) -> Iterator[Delta]:
        """Behind the arguments: another call, or nothing more."""
        for opening, name in self._next.items():
            if self._rest.startswith(opening):
                self._rest = self._rest[len(opening) :]
                yield self._begin(name)
                return
