"""`forerun audit --server`: on forerun's own server, and on answers made up for each outcome."""

from __future__ import annotations

import io
import json
import math

import pytest
from typer.testing import CliRunner

from forerun.cli import app
from forerun.errors import SettingError
from forerun.lab.server_audit import OpenAIServer, ToldToken, compare, forerun_plain
from serve.conftest import running
from serve.test_tools import Served


def text(*places: tuple[str, dict[str, float]]) -> list[ToldToken]:
    return [ToldToken(token, top[token], top) for token, top in places]


A = ("a", {"a": -0.1, "b": -3.0})
MOVED = ("a", {"a": -0.11, "b": -3.0})


@pytest.mark.parametrize(
    ("first", "second", "outcome", "position"),
    [
        (text(A, A), text(MOVED, MOVED), "identical", None),
        (text(A, ("a", {"a": -0.7, "b": -0.71})), text(MOVED, ("b", {"a": -0.72, "b": -0.7})),
         "near-tie", 1),
        (text(A, ("a", {"a": -0.1, "b": -3})), text(MOVED, ("b", {"a": -3, "b": -0.1})),
         "other text", 1),
        (text(A, ("b", {"a": -0.1, "b": -3})), text(MOVED, ("a", {"a": -0.1, "b": -3})),
         "fault", 1),
        (text(A, ("a", {"a": -0.1})), text(MOVED, ("c", {"c": -0.1})), "other text", 1),
        (text(A), text(MOVED, MOVED), "other text", 1),
        # Without rounding to be seen, what servers round when they write is the least.
        (text(("a", {"a": -0.69315, "b": -0.69317})), text(("b", {"a": -0.69316, "b": -0.69315})),
         "near-tie", 0),
    ],
)  # fmt: skip
def test_outcomes(first, second, outcome, position):
    (got,) = compare([(first, second)])
    assert (got.outcome, got.position) == (outcome, position)


def test_one_wrong_place_does_not_excuse_itself():
    wrong = text(*[A] * 20, ("a", {"a": -0.1, "b": -3}))
    other = text(*[MOVED] * 20, ("b", {"a": -3, "b": -0.1}))
    spike = text(*[A] * 20), text(*[MOVED] * 19, ("a", {"a": -2.0, "b": -3.0}))
    assert [c.outcome for c in compare([(wrong, other), spike])] == ["other text", "identical"]


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "busy"}, {"choices": []}, {"choices": [None]}, [1],
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["?"]}}]},
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_said_to_be_one(monkeypatch, answer):
    def answered(request, timeout):
        models = request.full_url.endswith("/models")
        return io.BytesIO(json.dumps({"data": [{"id": "m"}]} if models else answer).encode())

    monkeypatch.setattr("urllib.request.urlopen", answered)
    with pytest.raises(
        SettingError, match=r"completions (answers in no form known|cannot be read)"
    ):
        OpenAIServer("http://there").write("Hello", 3)


def test_a_server_against_itself_without_speculation(shipped, tmp_path):
    lines = [{"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    argv = ["audit", "--server", shipped.url, "--prompts", str(prompts), "--max-new-tokens", "12"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "2 of 2 identical, 0 near-tie, 0 other text, 0 fault"


def test_a_server_with_another_text(shipped, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    other = Served("hermes")
    other.answer = "Nothing like that."
    with running(other.model()) as server:
        argv = ["audit", "--server", shipped.url, "--against", f"{server.url}/v1", "--json"]
        done = CliRunner().invoke(app, [*argv, "--prompts", str(prompts), "--max-new-tokens", "4"])
    assert done.exit_code == 1, done.output
    (difference,) = json.loads(done.stdout)["differences"]
    assert (difference["outcome"], difference["position"]) == ("other text", 0)


def test_servers_that_cannot_be_audited(shipped):
    for url in ("http://127.0.0.1:9", "127.0.0.1:9/v1", "ftp:/x", "x://y", "[", "a:b"):
        with pytest.raises(SettingError, match="/v1/models cannot be read"):
            _ = OpenAIServer(url).model
    with pytest.raises(SettingError, match="answered 400"):
        OpenAIServer(shipped.url).write("", 3)
    foreign = OpenAIServer(shipped.url)
    foreign.model = {"id": "x", "owned_by": "vllm"}
    with pytest.raises(SettingError, match="against"):
        forerun_plain(foreign)
    assert math.isfinite(OpenAIServer(shipped.url).write("Once", 1)[0].logprob)
