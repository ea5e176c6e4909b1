"""Conversations as a model's own template writes them, and texts with special tokens in them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from forerun.checks import encodable
from forerun.errors import PromptError, SettingError, first_line

OWN = frozenset(
    {"conversation", "chat_template", "tools", "tokenize", "return_dict", "return_tensors",
     "add_generation_prompt", "continue_final_message", "documents", "truncation", "padding"}
)  # fmt: skip
"""Arguments of `apply_chat_template` that are no variables of a template."""
FENCES = frozenset(map(chr, range(0xE000, 0xF8FF)))
"""Letters without a meaning (Unicode's private use area): where a control token is split."""
_QUESTION, _ANSWER, _NEXT = "First question", "The answer", "Second question"
"""Of a conversation that shows how a template writes turns."""
_LISTED: Any = {"name": "listed", "description": "A function.", "parameters": {"type": "object",
    "properties": {"key": {"type": "integer", "description": "A number."}}}}  # fmt: skip
_CALL = re.compile(
    r'(\{\s*"name":\s*")called(",\s*"(?:arguments|parameters)":\s*)\{"key":\s*1\}'
    r'(?:,\s*"id":\s*"[^"]*")?(\s*\})'
)
"""A call as a template writes it. Models leave out the id that some templates write."""


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around an answer."""

    ends: tuple[str, ...] = ()  # strings, perhaps special tokens, where another turn begins
    lead: str = ""  # white space between the beginning of the turn and the answer


def conversation(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates take them: dicts with a role and, as text, a content.

    Raises:
        PromptError: they are none; says which one and why.

    >>> conversation([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError("messages must be a list of dicts like {'role': 'user', 'content': 'Hi'}")
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {place} must be a dict with a role and a content")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        wrong = [kind for kind in kinds if kind not in ("text", "input_text", "output_text")]
        if wrong:
            raise PromptError(f"message {place} has a part of type {wrong[0]!r}; only text is read")
        content = "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise PromptError(f"the content of message {place} must be text, got {content!r:.60}")
    return {**message, "content": content or ""}


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer can write conversations."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool = True,
    resume: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation by the model's own template.

    Special tokens come from the template alone: a message that holds the text of one is read as
    that text. Without such, the ids are those of `apply_chat_template`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: each with role and content (`conversation`).
        answer: end with the beginning of an answer.
        resume: let the model go on with the last message instead.
        tools: functions that the model may call, as JSON schemas.
        options: variables for the template.

    Raises:
        PromptError: no template, or one that refuses the messages.
        SettingError: `options` that are no variables of a template.
    """
    if taken := OWN & set(options or ()):
        raise SettingError(f"chat_template_kwargs may not set {min(taken)!r}")
    if not has_template(tokenizer):
        raise PromptError("this model has no chat template; give a text or token ids")
    given = {"messages": list(messages), "tools": tools and list(tools), **(options or {})}
    fence = _Fence(tokenizer, given)
    text = _write(tokenizer, fence.split(given), answer, resume)
    return fence.encode(encodable(text, "the conversation"))


def _write(tokenizer: Any, given: Any, answer: bool = False, resume: bool = False) -> str:
    from jinja2 import TemplateError

    given = dict(given)
    try:
        return str(
            tokenizer.apply_chat_template(
                given.pop("messages"),
                tokenize=False,
                add_generation_prompt=answer and not resume,
                continue_final_message=resume,
                **given,
            )
        )
    except (TemplateError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = first_line(error)
        raise PromptError(f"the chat template refuses these messages: {why}") from error


class _Fence:
    """Keeps the text of special tokens in a conversation from becoming these tokens. A letter that
    occurs nowhere else is put into each, and the rendered text is encoded in the parts between
    these letters. A conversation without special tokens stays as it is."""

    def __init__(self, tokenizer: Any, given: Any) -> None:
        self._tokenizer = tokenizer
        names = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = [name for name in names if len(name) > 1]
        written = json.dumps(given, ensure_ascii=False, default=str)
        escaped = [json.dumps(name, ensure_ascii=False)[1:-1] for name in self._special]
        self._used = any(name in written for name in escaped)
        self._letter = min(FENCES - set(written), default="") if self._used else ""
        if self._used and not self._letter:
            raise PromptError("a conversation with special tokens' names holds all private letters")

    def split(self, given: Any) -> Any:
        """What is given, with split names of special tokens."""
        return _changed(given, self._one) if self._used else given

    def _one(self, text: str) -> str:
        for name in self._special:
            while name in text:  # an outer one may be left once an inner one is split
                text = text.replace(name, f"{name[0]}{self._letter}{name[1:]}")
        return text

    def encode(self, text: str) -> list[int]:
        parts = text.split(self._letter) if self._used else [text]
        encode = self._tokenizer.encode
        return [token for part in parts for token in encode(part, add_special_tokens=False)]


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Nested lists and dicts with all text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(item, change) for item in value]
    return value


def turns(tokenizer: Any) -> Turns:
    """How a tokenizer's chat template writes turns; nothing where that cannot be seen."""
    return _turns(tokenizer, str(tokenizer.chat_template)) if has_template(tokenizer) else Turns()


@lru_cache(maxsize=8)
def _turns(tokenizer: Any, template: str) -> Turns:
    question, again = ({"role": "user", "content": text} for text in (_QUESTION, _NEXT))
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        asked = _write(tokenizer, {"messages": [question]}, answer=True)
        text = _write(tokenizer, {"messages": [question, answer, again]})
        asked_again = _write(tokenizer, {"messages": [question, answer, again]}, answer=True)
    except PromptError:
        return Turns()
    if _ANSWER not in text or _NEXT not in text:
        return Turns()
    lead = text[len(asked) : text.index(_ANSWER)] if text.startswith(asked) else ""
    after = text[text.index(_ANSWER) + len(_ANSWER) : text.index(_NEXT)]
    special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    first = next((name for name in special if after.lstrip().startswith(name)), None)
    if first is not None:
        ends = [first]
    else:
        begin = asked_again[asked_again.index(_NEXT) + len(_NEXT) :]
        ends = [marker.rstrip() for marker in (after, begin) if len(marker.strip()) > 1]
    return Turns(tuple(dict.fromkeys(ends)), "" if lead.strip() else lead)


@dataclass(frozen=True)
class CallFormat:
    """How a chat template writes calls of functions: JSON between fixed texts."""

    begin: str  # before the first call; empty: the answer begins with the call itself
    name: str  # before the name of a call's function
    arguments: str  # between that name and the arguments, which are JSON
    close: str  # behind them
    between: str | None  # what parts two calls; None: an answer holds one
    end: str  # behind the last call, before the end of the turn

    def head(self, name: str) -> str:
        """A call up to its arguments."""
        return f"{self.name}{name}{self.arguments}"


def call_format(tokenizer: Any) -> CallFormat | None:
    """How a tokenizer's chat template writes calls; None where it does not, or not as JSON."""
    return _calls(tokenizer, str(tokenizer.chat_template)) if has_template(tokenizer) else None


@lru_cache(maxsize=8)
def _calls(tokenizer: Any, template: str) -> CallFormat | None:
    question = {"role": "user", "content": _QUESTION}
    given = {"tools": [{"type": "function", "function": _LISTED}]}

    def written(count: int) -> tuple[str, list[re.Match[str]]]:
        function = {"name": "called", "arguments": {"key": 1}}
        ids = [f"00000000{i}" for i in range(count)]
        calls = [{"id": one, "type": "function", "function": function} for one in ids]
        results = [
            {"role": "tool", "name": "called", "tool_call_id": one, "content": _ANSWER}
            for one in ids
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text = _write(tokenizer, {"messages": [question, turn, *results], **given})
        return text, list(_CALL.finditer(text))

    try:
        asked = _write(tokenizer, {"messages": [question], **given}, answer=True)
        text, calls = written(1)
    except PromptError:
        return None
    if "listed" not in asked or len(calls) != 1 or not text.startswith(asked):
        return None
    call = calls[0]
    behind = text[call.end() :]
    ends = [behind.index(end) for end in turns(tokenizer).ends if end in behind]
    if not ends:
        return None
    try:
        pair, two = written(2)
        between = pair[two[0].end() : two[1].start()] if len(two) == 2 else None
    except PromptError:  # as Llama 3's
        between = None
    begin, end = text[len(asked) : call.start()], behind[: min(ends)]
    name, arguments, close = call.groups()
    return CallFormat(begin.lstrip(), name, arguments, close, between, end.rstrip())


def is_instruct(tokenizer: Any, eos: Collection[int | None]) -> bool:
    """Whether a model was made to answer: its template's end of a turn is an end of text."""
    ids = tokenizer.convert_tokens_to_ids(list(turns(tokenizer).ends)) if tokenizer else []
    return any(token in eos for token in ids)


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Token ids of a text; one that begins with the begin-of-text token does not get another.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: of which the names of special tokens are these tokens.
        special: whether to add what the tokenizer adds to a text.
    """
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=special))
    if special and len(ids) > 1 and ids[0] == ids[1] and ids[0] in tokenizer.all_special_ids:
        bare = tokenizer.encode(text, add_special_tokens=False)
        if bare[:1] == ids[:1] and len(bare) < len(ids):
            return ids[1:]
    return ids
