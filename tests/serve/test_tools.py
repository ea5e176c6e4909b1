"""Tools, by three templates' own formats: the model is scripted, its client is OpenAI's."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import forerun
import real
from forerun.chat import CallFormat
from forerun.drafters.model import ModelDrafter
from forerun.serve.tools import Call, Calling, CallReader
from forerun.testing import ScriptedModel
from serve.conftest import running

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

END = "<|im_end|>"
HERMES = """{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if loop.first and tools %}<tools>{{ tools | tojson }}</tools>{% endif %}\
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}\
{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first or m.content }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}

{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}\
{% set c = m.tool_calls[0].function %}\
{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}\
{% else %}{% if m.role == 'user' and tools %}{{ tools | tojson }}

{% endif %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}\
{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}\
{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}\
{% set out = c.function | tojson %}{{ out[:-1] }}, "id": "{{ c.id }}"}\
{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>{% elif m.role == 'tool' %}\
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]\
{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
CALLS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "Weather", "arguments": %s}\n</tool_call>',
    "llama": '{"name": "Weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "Weather", "arguments": %s}]',
}
TWICE = {
    "hermes": '<tool_call>\n{"name": "Weather", "arguments": %s}\n</tool_call>\n<tool_call>\n'
    '{"name": "Weather", "arguments": %s}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "Weather", "arguments": %s}, '
    '{"name": "Weather", "arguments": %s}]',
}
ROME, OSLO = '{"city": "Rome", "days": 2}', '{"city": "Oslo", "days": 2}'
QUESTION = [{"role": "user", "content": "Is it warm?"}]


class Weather(BaseModel):
    """The weather."""

    city: Literal["Rome", "Oslo"]
    days: int


TOOL = openai.pydantic_function_tool(Weather)
TIME = {"type": "function", "function": {"name": "now", "description": "The time."}}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", END, "[TOOL_CALLS]"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.chat_template = template
    return made


class Served:
    """A server whose model says `answer` where a turn begins, and 21 degrees behind a result."""

    def __init__(self, kind: str) -> None:
        self.kind, self.answer = kind, ""
        self.tokenizer = tokenizer(TEMPLATES[kind])
        self.opens = "[/INST]" if kind == "mistral" else "<|im_start|>assistant\n"
        self.result = {
            "hermes": "</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "llama": "21<|im_end|><|im_start|>assistant\n\n",
            "mistral": "[/TOOL_RESULTS]",
        }[kind]
        if kind == "llama":
            self.opens += "\n"
        self.size, self._wants = len(self.tokenizer), [0]
        self._known: tuple[str, tuple[int, ...]] = "", ()
        self.target, self.draft = ScriptedModel(self._says), ScriptedModel(self._says)

    def _says(self, context: tuple[int, ...]) -> torch.Tensor:
        answer, prompt, end = self.answer, self._known[1], self.tokenizer.eos_token_id
        new = context[len(prompt) :]
        if (answer, prompt) != (self._known[0], context[: len(prompt)]) or end in new:
            self._known, self._wants = (answer, context), self._continued(context)
            new = ()
        at, logits = len(new), torch.zeros(self.size)
        logits[self._wants[at] if at < len(self._wants) else self._wants[-1]] = 9
        return logits

    def _continued(self, context: tuple[int, ...]) -> list[int]:
        """What is said after a context that ends in the middle of an answer, or before one."""
        text = self.tokenizer.decode(list(context))
        results, answers = text.rfind(self.result), text.rfind(self.opens)
        written = text[max(results + len(self.result), answers + len(self.opens)) :]
        ids = self.tokenizer.encode(("It is 21 degrees." if results >= 0 else self.answer) + END)
        return ids[len(self.tokenizer.encode(written)) :] or ids[-1:]

    def model(self) -> forerun.Model:
        drafter = ModelDrafter(self.draft, self.size)
        return forerun.Model(self.target, drafter, self.tokenizer)


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request):
    made = Served(request.param)
    with running(made.model(), max_rows=2, controller="fixed(3)") as server:
        made.url, made.server = server.url, server
        yield made


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client, messages=QUESTION, tools=(TOOL, TIME), **more):
    more.setdefault("temperature", 0)
    return client.chat.completions.create(
        model="forerun", messages=messages, tools=list(tools), **more
    ).choices[0]


def test_a_conversation_with_a_tool(served, client):
    served.answer = CALLS[served.kind] % ROME
    first = ask(client)
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "Weather",
        json.loads(ROME),
    )
    assert first.finish_reason == "tool_calls"
    assert first.message.content == ("Let me see.\n" if served.kind == "hermes" else None)
    turns = [
        *QUESTION, first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21"},
    ]  # fmt: skip
    second = ask(client, turns)
    assert (second.message.content, second.finish_reason) == ("It is 21 degrees.", "stop")


def test_streams_and_plain_decoding_are_the_same(served, client):
    served.answer = CALLS[served.kind] % OSLO
    whole = ask(client).message
    for speculative in (False, {"controller": "fixed(7)"}):
        text, calls = "", {}
        for chunk in client.chat.completions.create(
            model="forerun", messages=QUESTION, tools=[TOOL], temperature=0, stream=True,
            extra_body={"speculative": speculative},
        ):  # fmt: skip
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    name, arguments = calls.get(part.index, (None, ""))
                    calls[part.index] = (
                        part.function.name or name,
                        arguments + (part.function.arguments or ""),
                    )
                finish = choice.finish_reason or ""
        assert (text or None, finish) == (whole.content, "tool_calls")
        assert calls == {0: ("Weather", OSLO)}


def test_what_openai_parses(served, client):
    served.answer = CALLS[served.kind] % ROME
    given = {"model": "forerun", "messages": QUESTION, "tools": [TOOL], "temperature": 0}
    done = client.chat.completions.parse(**given).choices[0].message
    assert done.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=2)
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=2)


def test_arguments_are_held_to_the_schema(served, client):
    served.answer = CALLS[served.kind] % '{"town": "Rome"}'
    (call,) = ask(client, parallel_tool_calls=False).message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_a_choice_forces_a_call(served, client):
    served.answer = "No."
    assert ask(client).message.content == "No."
    assert ask(client, tool_choice="none").message.tool_calls is None
    must = ask(client, tools=[TIME], tool_choice="required", parallel_tool_calls=False)
    assert [call.function.name for call in must.message.tool_calls] == ["now"]
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "required", "tools": [named]}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": allowed}):
        forced = ask(client, tool_choice=choice, parallel_tool_calls=False)
        (call,) = forced.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_two_calls_at_once(served, client):
    if served.kind not in TWICE:
        served.answer = CALLS[served.kind] % ROME
        assert len(ask(client).message.tool_calls) == 1
        return
    served.answer = TWICE[served.kind] % (ROME, OSLO)
    both = ask(client).message.tool_calls
    assert [call.function.arguments for call in both] == [ROME, OSLO]
    assert len({call.id for call in both}) == 2
    assert len(ask(client, parallel_tool_calls=False).message.tool_calls) == 1


def test_a_text_cut_off_in_a_call_says_so(served, client):
    served.answer = CALLS[served.kind] % ROME
    cut = ask(client, max_tokens=len(CALLS[served.kind]))
    assert cut.finish_reason == "length"
    assert ROME.startswith(cut.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         400, "none of the tools"),
        ({"tool_choice": "required"}, 400, "needs tools"),
        ({"tools": [TOOL, TOOL]}, 400, "same name"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": [{"type": "custom"}]}, 501, "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "name"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
         400, "no JSON object"),
        ({"messages": [{"role": "function", "name": "f", "content": "1"}]}, 501, "functions"),
    ],
)  # fmt: skip
def test_what_is_refused(served, body, status, word):
    answer = served.server.post("/v1/chat/completions", **{"messages": QUESTION} | body)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"]


def test_a_template_without_calls_is_refused_by_name(shipped):
    answer = shipped.post("/v1/chat/completions", messages=QUESTION, tools=[TIME])
    assert (answer.status_code, answer.json()["error"]["param"]) == (501, "tools")


def readers() -> list[tuple[Calling, str, list[Any]]]:
    hermes = CallFormat("<c>\n", '{"name": "', '", "arguments": ', "}", "\n</c>\n<c>\n", "\n</c>")
    llama = CallFormat("", '{"name": "', '", "parameters": ', "}", None, "")
    one = '{"a": "}\\"{", "b": [{}]}'
    both = (
        f'<c>\n{{"name": "f", "arguments": {one}}}\n</c>\n<c>\n{{"name": "g", "arguments": {{}}}}'
    )
    schemas = {"f": {}, "g": {}}
    return [
        (Calling(hermes, schemas, False, True, [], {}), f"Hi <c> <c>\n{both[4:]}\n</c>",
         ["Hi <c> ", ("f", one), ("g", "{}")]),
        (Calling(hermes, schemas, False, True, [], {}), "a <c", ["a <c"]),
        (Calling(llama, schemas, False, True, [], {}), f'{{"name": "g", "parameters": {one}}}',
         [("g", one)]),
        (Calling(llama, schemas, False, True, [], {}), 'a {"name": "g", "parameters": {}}',
         ['a {"name": "g", "parameters": {}}']),
        (Calling(llama, schemas, False, True, [], {}), '{"name": ', ['{"name": ']),
    ]  # fmt: skip


@pytest.mark.parametrize(("may_call", "text", "wanted"), readers())
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_reader_takes_any_pieces(may_call, text, wanted, step):
    reader, got = CallReader(may_call), ""
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    grown: dict[int, str] = {}
    for i, piece in enumerate(pieces):
        for delta in reader.push(piece, i == len(pieces) - 1):
            if isinstance(delta, str):
                got += delta
            else:
                call, new = delta
                assert isinstance(call, Call)
                grown[call.index] = grown.get(call.index, "") + new
    calls = [(call.name, call.arguments) for call in reader.calls]
    assert [*([got] if got else []), *calls] == wanted
    assert list(grown.values()) == [arguments for _, arguments in calls]


class Forecast(BaseModel):
    """Get the current weather of a city."""

    city: str


@pytest.mark.slow
def test_a_conversation_with_a_tool_on_qwen():
    """Speculative, plain and streamed answers are the same, in both steps."""
    pytest.importorskip("openvino")
    model = forerun.load(real.qwen(), runtime="openvino")
    turns = [{"role": "user", "content": "What is the weather in Rome right now?"}]
    given = {"tools": [openai.pydantic_function_tool(Forecast)], "max_tokens": 60}
    with (
        running(model, max_rows=1) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):

        def answers(**more):
            plainly = {"extra_body": {"speculative": False}}
            both = [ask(client, turns, **given, **more, **way) for way in ({}, plainly)]
            ours, plain = ([a.message.content, *calls_of(a.message)] for a in both)
            assert ours == plain
            return both[0].message

        first = answers(tool_choice="required", parallel_tool_calls=False)
        (call,) = first.tool_calls
        assert call.function.name == "Forecast"
        assert "Rome" in json.loads(call.function.arguments)["city"]
        turns.append(first.model_dump(exclude_none=True))
        result = json.dumps({"celsius": 21, "sky": "clear"})
        turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = answers()
        assert "21" in second.content
        streamed = client.chat.completions.create(
            model="forerun", messages=turns, temperature=0, stream=True, **given
        )
        text = "".join(c.delta.content or "" for chunk in streamed for c in chunk.choices)
        assert text == second.content


def calls_of(message):
    """Name and arguments of its calls."""
    return [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
