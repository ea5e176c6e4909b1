"""OpenAI's Responses, by its own client."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from serve.conftest import running
from serve.test_tools import CALLS, ROME, Served, Weather, openai

SAID = {"model": "forerun", "input": "Who are you?", "temperature": 0}
JSON = {"content-type": "application/json"}


@pytest.fixture
def client(shipped):
    with openai.OpenAI(base_url=f"{shipped.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def caller():
    made = Served("hermes")
    made.answer = CALLS["hermes"] % ROME
    with (
        running(made.model(), max_rows=2, controller="fixed(3)") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def test_a_text_is_that_of_chat(client):
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": SAID["input"]}]
    chat = client.chat.completions.create(model="forerun", messages=turns, temperature=0)
    done = client.responses.create(**SAID, instructions="Be kind.")
    assert done.output_text == chat.choices[0].message.content
    assert (done.status, done.usage.output_tokens) == ("completed", chat.usage.completion_tokens)
    parts = [{"type": "input_text", "text": SAID["input"]}]
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    again = client.responses.create(**SAID | {"input": items})
    assert again.output_text == done.output_text
    assert again.usage.total_tokens == done.usage.total_tokens


def test_a_stream_tells_the_same_in_order(client):
    whole = client.responses.create(**SAID)
    with client.responses.stream(**SAID) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == whole.output_text
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_a_text_cut_off_is_incomplete(client):
    cut = client.responses.create(**SAID, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(**SAID, max_output_tokens=3) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_schema(client):
    class Pet(BaseModel):
        tame: bool

    parsed = client.responses.parse(**SAID, text_format=Pet, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, Pet)


def test_a_conversation_with_a_tool(caller):
    tool = openai.pydantic_function_tool(Weather)
    flat = {"type": "function", **tool["function"]}
    question = [{"role": "user", "content": "Is it warm?"}]
    given = {"model": "forerun", "tools": [flat], "temperature": 0}
    first = caller.responses.create(**given, input=question)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("Weather", ROME)
    with caller.responses.stream(**given, input=question) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == ROME
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ROME
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    items = [*question, *(item.model_dump() for item in first.output), result]
    second = caller.responses.create(**given, input=items)
    assert second.output_text == "It is 21 degrees."
    forced = {"type": "function", "name": "Weather"}
    must = caller.responses.create(**given, input=question, tool_choice=forced)
    assert [item.type for item in must.output] == ["function_call"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"previous_response_id": "resp_1"}, 501, "previous_response_id"),
        ({"include": ["file_search_call.results"]}, 501, "include"),
        ({"prompt": {"id": "p"}}, 501, "prompt"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 501, "input"),
        ({"tools": [{"type": "web_search"}]}, 501, "tools"),
        ({"input": [{"role": "nobody", "content": "x"}]}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "reasoning"}]}, 400, "input"),
        ({"text": {"format": {"type": "nonsense"}}}, 400, "text"),
        ({"temprature": 1}, 400, "temprature"),
        ({"metadata": {"a": float("nan")}}, 400, "metadata"),
        ({"instructions": "\ud800"}, 400, "input"),
        ({"store": True, "truncation": "disabled", "include": []}, 200, None),
    ],
)
def test_what_is_not_kept_is_named(shipped, body, status, field):
    text = json.dumps(SAID | {"max_output_tokens": 2} | body)  # what httpx would not write, too
    answer = shipped.http.post("/responses", content=text, headers=JSON)
    assert answer.status_code == status, answer.text
    error = answer.json().get("error")
    assert (error and error["param"]) == field
    assert "messages" not in answer.text


def test_an_error_in_a_stream_is_an_event():
    made = Served("hermes")
    made.answer = None  # nothing can be written
    with running(made.model()) as server:
        answer = server.post("/v1/responses", input="x", stream=True)
        last = answer.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["message"]
        assert "[DONE]" not in answer.text
