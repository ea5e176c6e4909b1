"""What clients send: OpenAI's fields, vLLM's, and `speculative`.

Fields we know are checked; a field that looks like a misspelt one is refused; others are ignored
and listed in the answer, since many clients send fields of their own.
"""

import difflib
import json
import tomllib
from importlib.resources import files
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from forerun.serve.errors import bad, unsupported

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is told: a body has room for a million, and to tell of all
takes seconds in which nobody is heard."""
MAX_SPEC = 400  # characters of a controller's or rule's spec
MAX_EXTRA = 256  # fields that are none of ours: each is compared with those that are
_TABLE = tomllib.loads(files("forerun.serve").joinpath("fields.toml").read_text("utf-8"))
REFUSED = {name: (words, nothing) for name, (words, *nothing) in _TABLE["refused"].items()}
"""By field the beginning of why it is refused, and values that ask for nothing."""
NEUTRAL = frozenset(chain(*_TABLE["neutral"].values()))
"""Fields that change no text."""


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SpeculativeFields(BaseModel):
    """How to speculate for this request."""

    model_config = ConfigDict(extra="forbid")

    controller: str | None = Field(None, max_length=MAX_SPEC, examples=["gammatune(eta=0.3)"])
    rule: str | None = Field(None, max_length=MAX_SPEC, examples=["standard"])
    report: Literal["none", "summary", "rounds"] | None = None


class FlatFields(SpeculativeFields):
    """Fields of `speculative` as clients of vLLM can spell them."""

    model_config = ConfigDict(extra="ignore", alias_generator="forerun_{}".format)


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Prediction(BaseModel):
    """Text that the answer is expected to hold: drafted where it fits."""

    type: Literal["content"] = "content"
    content: str | Items[Part]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class JsonSchema(BaseModel):
    """A schema with a name."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's: what the answer must be."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's: what the answer must be, one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="in Lark's notation, from a rule `start`")
    json_object: bool | None = None


class Generation(BaseModel):
    """Fields that both kinds of request have."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(
        None, ge=-1, description="0 writes nothing: echo scores; -1: as many as the context holds"
    )
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1 keeps all")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-1000, le=1000)
    frequency_penalty: float | None = Field(None, ge=-1000, le=1000)
    logit_bias: dict[int, float] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Items[str] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=64)] | None = None
    min_tokens: int | None = Field(None, ge=0)
    bad_words: Annotated[Items[str], Field(max_length=128)] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    speculative: StrictBool | SpeculativeFields | None = None
    vllm_xargs: FlatFields | None = None

    def ignored(self) -> list[str]:
        """Names of fields that were sent for others; `ApiError` 400 for one that is nearly one of
        ours, 501 for one that matters and is not served."""
        known = set(type(self).model_fields)
        strange, extra = [], self.model_extra or {}
        if len(extra) > MAX_EXTRA:
            raise bad(f"{len(extra)} unknown fields; at most {MAX_EXTRA} are taken")
        for name, value in extra.items():
            words, nothing = REFUSED.get(name, ("", []))
            if value is None or value in nothing or name in NEUTRAL:
                continue
            if words:
                raise unsupported(words, name)
            if name == "best_of":
                if value != (self.n or 1):
                    raise bad(f"best_of must equal n or be left out, got {value!r}", "best_of")
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.84)
            if near:
                raise bad(f"unknown field {name!r}; did you mean {near[0]!r}?", name)
            strange.append(name)
        return strange


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[Items[TokenId], Field(min_length=1)]
        | Annotated[Items[str], Field(min_length=1, max_length=1024)]
        | Annotated[
            Items[Annotated[Items[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=1024),
        ]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class FunctionName(BaseModel):
    """Names one of the tools."""

    name: str


class Function(BaseModel):
    """What a model may call; its arguments are held to `parameters`, strict or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema; left out: none")


class Tool(BaseModel):
    """OpenAI's: a function."""

    type: str
    function: Function | None = None


class NamedTool(BaseModel):
    """One of the tools."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(BaseModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedChoice(BaseModel):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(BaseModel):
    """What was called, with JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates take it, with the arguments read; `ApiError` if they are no JSON
        object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad(f"the arguments of {self.function.name!r:.80} are no JSON object", "messages")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[Part] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it; `ApiError` 501 for anything but text and calls."""
        if self.role == "function":
            raise unsupported("functions are (give tools)", "messages")
        parts = self.content or ""
        if not isinstance(parts, str):
            for part in parts:
                if part.type not in ("text", "input_text", "output_text") or part.text is None:
                    raise unsupported(f"message parts of type {part.type!r} are", "messages")
            parts = "".join(part.text or "" for part in parts)
        role = "system" if self.role == "developer" else self.role
        out: dict[str, Any] = {"role": role, "content": parts}
        if self.tool_calls:
            out["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            out |= {k: v for k in ("tool_call_id", "name") if (v := getattr(self, k)) is not None}
        return out


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Items[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=-1)
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Items[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | AllowedChoice | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a prompt (vLLM), a content (llama.cpp) or messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Items[TokenId]
