"""Every field of other projects' requests has an owner: served, refused or neutral."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from forerun.serve.errors import ApiError
from forerun.serve.protocol import (
    MAX_EXTRA,
    NEUTRAL,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from forerun.serve.responses import ResponseRequest

LISTS: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "fields.json").read_text(encoding="utf-8")
)
KINDS = CompletionRequest, ChatRequest, ResponseRequest
SERVED = {"best_of"}.union(*(kind.model_fields for kind in KINDS))


@pytest.mark.parametrize("source", LISTS)
def test_every_field_has_an_owner(source):
    unknown = set(LISTS[source]) - SERVED - REFUSED.keys() - NEUTRAL
    assert unknown == set()


def test_no_field_has_two_owners():
    both = (ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()) | {"best_of"}
    assert not both & REFUSED.keys()
    assert {"metadata"} == SERVED & NEUTRAL  # only /v1/responses answers with it
    assert not REFUSED.keys() & NEUTRAL


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_named_unless_it_asks_for_nothing(name):
    for value in (None, *REFUSED[name][1]):
        assert CompletionRequest(prompt="x", **{name: value}).ignored() == []
    if name in CompletionRequest.model_fields:
        return
    with pytest.raises(ApiError) as refused:
        CompletionRequest(prompt="x", **{name: object()}).ignored()
    assert (refused.value.status, refused.value.param) == (501, name)


def test_the_lists_are_those_of_the_installed_openai():
    openai = pytest.importorskip("openai")
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for kind, params in (
        ("chat", chat.CompletionCreateParamsBase),
        ("completions", completions.CompletionCreateParamsBase),
        ("responses", responses.ResponseCreateParamsBase),
    ):
        fields = {*params.__annotations__, "stream"}
        unknown = fields - SERVED - REFUSED.keys() - NEUTRAL
        assert unknown == set(), f"new in openai {openai.__version__}, {kind}"


@pytest.mark.slow
def test_the_lists_are_those_of_the_installed_vllm():
    params = pytest.importorskip("vllm.sampling_params")
    fields = {name for name in params.SamplingParams.__struct_fields__ if name[0] != "_"}
    assert fields - SERVED - REFUSED.keys() - NEUTRAL == set()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * 5000}),
        (CompletionRequest, {"prompt": [1] * 4999 + ["x"]}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1.5] * 5000}]}),
        (ChatRequest, {"messages": [1] * 4000}),
        (DetokenizeRequest, {"tokens": ["x"] * 5000}),
    ],
)
def test_of_a_list_the_first_wrong_item_is_told_and_no_more(kind, body):
    """A body has room for a million of them: to tell all took seconds, and nobody was heard."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 5  # one for each kind of value that the field may have


def test_unknown_fields_are_not_compared_without_end():
    many = {f"field_{i}": 1 for i in range(MAX_EXTRA)}
    assert len(CompletionRequest(prompt="x", **many).ignored()) == MAX_EXTRA
    with pytest.raises(ApiError, match="257 unknown fields"):
        CompletionRequest(prompt="x", one=1, **many).ignored()
