"""OpenAI's Responses: read as a chat request, answered as items and named events."""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import Field, JsonValue, ValidationError

from forerun.engine import Event
from forerun.serve.answers import Answer
from forerun.serve.errors import ApiError, bad, unsupported
from forerun.serve.protocol import ChatRequest, Generation
from forerun.serve.streaming import dumps
from forerun.serve.tools import Call

NEEDLESS = frozenset({"reasoning.encrypted_content"})  # `include` may name it: there is none
NAMES: dict[int | str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What fields of a chat request are called here."""


class ResponseRequest(Generation):
    """`POST /v1/responses`; it keeps nothing, so every request holds its whole conversation."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    metadata: dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    prompt: Any = None

    def chat(self) -> ChatRequest:
        """The same as a chat request.

        Raises:
            RequestValidationError: something in it is none.
            ApiError: 501 for what is not served.
        """
        if self.prompt is not None:
            raise unsupported("stored prompts are", "prompt")
        if wanted := set(self.include or ()) - NEEDLESS:
            raise unsupported(f"including {min(wanted)!r:.80} is", "include")
        if (self.n or 1) > 1:
            raise bad("a response is one; leave n out", "n")
        given = self.model_dump(
            by_alias=True, exclude_none=True, exclude={*ResponseRequest.__annotations__}
        )
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given["messages"] = [*system, *_messages(self.input)]
        given["max_completion_tokens"] = self.max_output_tokens
        given["parallel_tool_calls"] = self.parallel_tool_calls
        if self.tools:
            given["tools"] = [_nested(tool) for tool in self.tools]
        choice: Any = self.tool_choice
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            tools = [_nested(tool) for tool in choice.get("tools", ())]
            choice = {"type": "allowed_tools", "allowed_tools": {**choice, "tools": tools}}
        given["tool_choice"] = _nested(choice) if isinstance(choice, Mapping) else choice
        given["reasoning_effort"] = (self.reasoning or {}).get("effort")
        if isinstance(form := (self.text or {}).get("format"), dict):
            given["response_format"] = {"type": form.get("type", "text")}
            if "schema" in form:
                given["response_format"]["json_schema"] = form
        try:
            return ChatRequest(**given)
        except ValidationError as error:
            problems = [p | {"loc": _named(*p["loc"])} for p in error.errors()]
            raise RequestValidationError(problems) from error


def _named(field: int | str, *rest: int | str) -> tuple[int | str, ...]:
    """Where a problem of the chat request is in the response's; turns are not counted alike."""
    return NAMES.get(field, field), *(rest[1:] if field == "messages" else rest)


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat has it: in an object of its own."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(items: str | list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The conversation; calls belong to the turn of the assistant before them."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    turn: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            if turn is None or turn["role"] != "assistant":
                if turn is not None:
                    yield turn
                turn = {"role": "assistant", "content": ""}
            function = {k: item.get(k) for k in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
            continue
        if turn is not None:
            yield turn
        if kind == "message":
            turn = {"role": item.get("role"), "content": item.get("content")}
        elif kind == "function_call_output":
            call_id, output = item.get("call_id"), item.get("output")
            turn = {"role": "tool", "tool_call_id": call_id, "content": output}
        else:
            raise unsupported(f"input items of type {kind!r:.80} are", "input")
    if turn is not None:
        yield turn


class ResponseAnswer:
    """An answer as a response: items, or the events that make them."""

    def __init__(self, answer: Answer, request: ResponseRequest) -> None:
        self._answer, self._request = answer, request
        self._id = f"resp_{secrets.token_hex(12)}"
        self._count = 0
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self.take = answer.take

    def whole(self) -> dict[str, Any]:
        choice = self._answer.choices[0]
        calls = choice.reader.calls if choice.reader else []
        if (text := "".join(choice.text)) or not calls:
            self._items.append(_message(text))
        self._items += [_called(call) for call in calls]
        return self._response()

    def _response(self, status: str | None = None) -> dict[str, Any]:
        request, answer = self._request, self._answer
        done = answer.choices[0].done
        cut = done is not None and done.finish_reason in ("length", "context")
        out = {
            "id": self._id,
            "object": "response",
            "created_at": answer.created,
            "status": status or ("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": answer.model,
            "output": self._items,
            "usage": _usage(answer.usage()) if done is not None else None,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
        }
        for name in ("instructions", "temperature", "top_p", "max_output_tokens"):
            out[name] = getattr(request, name)
        return out | (answer.extras() if done is not None else {})

    # --- streams ----------------------------------------------------------------------------

    def _event(self, kind: str, **more: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._count, **more}
        self._count += 1
        return f"event: {kind}\n".encode() + b"data: " + dumps(value) + b"\n\n"

    def opening(self) -> bytes:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def frame(self, update: Event) -> bytes:
        text, _ = self._answer.take(update)
        events = list(self._text(text)) if text else []
        for call, new in self._answer.choices[0].calls:
            events += self._call(call, new)
        return b"".join(events)

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._open:
            yield from self._begin(_message(""))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", **self._place(), part=part)
        self._items[-1]["content"][0]["text"] += text
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _call(self, call: Call, new: str) -> Iterator[bytes]:
        if not new:
            yield from self._end()
            yield from self._begin(_called(Call(call.index, call.name, id=call.id)))
            return
        self._items[-1]["arguments"] += new
        kind = "response.function_call_arguments.delta"
        yield self._event(kind, **self._place(part=False), delta=new)

    def _place(self, part: bool = True) -> dict[str, Any]:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return at | ({"content_index": 0} if part else {})

    def _begin(self, item: dict[str, Any]) -> Iterator[bytes]:
        item["status"], self._open = "in_progress", True
        self._items.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else item
        at = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=at, item=shown)

    def _end(self) -> Iterator[bytes]:
        if not self._open:
            return
        item, self._open = self._items[-1], False
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": []}
            yield self._event("response.output_text.done", **self._place(), **text)
            yield self._event("response.content_part.done", **self._place(), part=part)
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            kind = "response.function_call_arguments.done"
            yield self._event(kind, **self._place(part=False), **called)
        at = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=at, item=item)

    def closing(self) -> bytes:
        events = [*self._end()]
        if not self._items:
            events += [*self._text(""), *self._end()]
        response = self._response()
        return b"".join([*events, self._event(f"response.{response['status']}", response=response)])

    def error(self, error: ApiError) -> bytes:
        body = error.to_json()["error"]
        return self._event("error", **{k: body[k] for k in ("code", "message", "param")})


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
    return {**item, "status": "completed", "content": [part]}


def _called(call: Call) -> dict[str, Any]:
    item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed"}
    return {**item, "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
