"""openai-python, as people use it."""

from __future__ import annotations

import asyncio
import enum
import typing

import pytest

openai = pytest.importorskip("openai")

TURNS = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def client(shipped):
    with openai.OpenAI(base_url=f"{shipped.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client):
    models = [model.id for model in client.models.list()]
    done = client.chat.completions.create(
        model=models[0], messages=TURNS, max_completion_tokens=40, logprobs=True, top_logprobs=2
    )
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == done.usage.completion_tokens
    assert done.timings["predicted_n"] == done.usage.completion_tokens  # others' fields arrive


def test_chat_stream(client):
    whole = client.chat.completions.create(model="forerun", messages=TURNS).choices[0].message
    stream = client.chat.completions.create(
        model="forerun", messages=TURNS, stream=True, stream_options={"include_usage": True},
        extra_body={"speculative": {"controller": "fixed(2)", "report": "rounds"}},
    )  # fmt: skip
    text, usage, rounds = "", None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            rounds += len((choice.model_extra.get("forerun") or {}).get("rounds", []))
    assert text == whole.content
    assert usage.completion_tokens > 0
    assert rounds > 1


def test_the_stream_helper(client):
    with client.chat.completions.stream(model="forerun", messages=TURNS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_completions(client):
    done = client.completions.create(
        model="forerun", prompt="Once upon a time", max_tokens=8, n=2, temperature=0, logprobs=2
    )
    assert len(done.choices) == 2
    assert len(done.choices[0].logprobs.tokens) == 8
    parts = client.completions.create(
        model="forerun", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in parts) == done.choices[0].text


def test_errors_have_their_classes(client):
    with pytest.raises(openai.BadRequestError, match="did you mean 'gammatune'"):
        client.completions.create(
            model="forerun", prompt="x", extra_body={"speculative": {"controller": "gamatune"}}
        )
    with pytest.raises(openai.NotFoundError, match="forerun"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.PermissionDeniedError):
        client.completions.create(
            model="forerun", prompt="x", extra_body={"speculative": {"rule": "typical"}}
        )


def test_a_stream_that_is_closed_frees_its_row(client, shipped):
    from serve.conftest import eventually

    stream = client.completions.create(
        model="forerun", prompt="Once", max_tokens=900, stream=True, temperature=1
    )
    next(iter(stream))
    stream.close()
    eventually(shipped.idle)


def test_many_at_once(shipped):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{shipped.url}/v1", api_key="none") as client:
            return await asyncio.gather(
                *(client.completions.create(model="forerun", prompt="Once", max_tokens=8)
                  for _ in range(8))
            )  # fmt: skip

    assert len({done.choices[0].text for done in asyncio.run(ask())}) == 1


def test_structured_outputs(client):
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")
    kinds = enum.Enum("Kind", {"CAT": "cat", "DOG": "dog"}, type=str)
    Pet = pydantic.create_model(
        "Pet", kind=(kinds, ...), age=(typing.Annotated[int, pydantic.Field(ge=0, le=20)], ...)
    )
    done = client.chat.completions.parse(
        model="forerun", messages=TURNS, response_format=Pet, max_completion_tokens=40
    )
    pet = done.choices[0].message.parsed
    assert isinstance(pet, Pet)
    assert pet.kind.value in ("cat", "dog")
    assert done.choices[0].finish_reason == "stop"
