"""Conversations: one makes the same tokens at every door."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest

import forerun as library
from forerun import chat
from forerun.errors import PromptError
from forerun.prompts import Prompt, Reader, read_file

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def instruct(pair, tmp_path_factory) -> str:
    """The tiny target with a template whose end of a turn is its end of text."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("instruct") / "target"
    shutil.copytree(pair.target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(instruct):
    return library.load(instruct, "none", device="cpu", runtime="torch")


@pytest.fixture
def on(forerun, instruct):
    """A command on that target."""

    def run(command: str, *argv: str):
        return forerun(command, "--target", instruct, "--draft", "none", "--device", "cpu", *argv)

    return run


def test_one_conversation_is_the_same_tokens_at_every_door(model, tmp_path, on):
    from forerun.serve.texts import Texts

    wanted = chat.render(model.tokenizer, TALK)
    assert model.encode(TALK) == wanted
    reader = Reader.of(model, wrap=True, system="Be kind.")
    assert reader.encode(["Hello"]) == reader.encode([TALK[1:]]) == reader.encode([TALK]) == wanted
    texts = Texts(model.tokenizer)
    assert texts.chat(TALK) == wanted
    texts.close()
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    [prompt] = Reader.of(model).prepare(read_file(str(path)))
    assert (prompt.ids, prompt.chat) == (wanted, True)
    how = {"max_new_tokens": 6, "ignore_eos": True}
    answers = [
        model.chat(TALK, **how),
        model.chat("Hello", "Be kind.", **how),
        model.generate([TALK], **how)[0],
        *(model.generate(p, **how) for p in (TALK, wanted, {"input_ids": wanted})),
        model.generate({"input_ids": [wanted]}, **how),
    ]
    assert len({tuple(a.tokens) for a in answers}) == 1
    rest = ("--max-new-tokens", "6", "--ignore-eos", "--json")
    for argv in (["Hello", "--system", "Be kind."], ["--prompt-file", str(path)]):
        [completion] = on("generate", *argv, *rest).json["completions"]
        assert completion["tokens"] == answers[0].tokens


def test_generate_puts_the_template_around_where_the_model_says_so(on, model, generate):
    rest = ("Hello", "--max-new-tokens", "6", "--ignore-eos", "--json")
    wrapped, raw = on("generate", *rest), on("generate", *rest, "--raw")
    assert "the model's chat template is around the prompt; --raw leaves it out" in wrapped.err
    assert (wrapped.json["settings"]["chat"], raw.json["settings"]["chat"]) == (True, False)
    [done], [plain] = wrapped.json["completions"], raw.json["completions"]
    how = {"max_new_tokens": 6, "ignore_eos": True}
    assert done["tokens"] == model.chat("Hello", **how).tokens
    assert plain["tokens"] == model.generate("Hello", **how).tokens
    base = generate(*rest)
    assert (base.err, base.json["settings"]["chat"]) == ("", False)
    refused = on("generate", "Hello", "--raw", "--chat")
    assert (refused.code, "--raw leaves the chat template out" in refused.error) == (2, True)


def test_lab_commands_leave_prompts_as_they_are(on, model, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"Hello"\n')
    given = ("--prompts", str(path), "--max-new-tokens", "4", "--batch-size", "1", "--json")
    plain, wrapped = on("audit", *given), on("audit", *given, "--chat")
    assert (plain.json["settings"]["chat"], wrapped.json["settings"]["chat"]) == (False, True)


def test_an_answer_ends_where_another_turn_begins():
    model = library.load(runtime="torch", device="cpu")
    assert not chat.is_instruct(model.tokenizer, model.eos)
    [prompt] = Reader.of(model, wrap=True).prepare([Prompt("Who are you?")])
    assert prompt.sampling.stop == chat.turns(model.tokenizer).ends
    assert "User:" not in model.chat("Who are you?", max_new_tokens=60).text


def test_more_than_one_text_is_refused_with_a_way_out(model):
    with pytest.raises(PromptError, match="holds 2 texts; give a list of their input_ids"):
        model.generate({"input_ids": [[1], [2]]})


def test_a_conversation_through_a_pipe(on, monkeypatch, tmp_path):
    path = tmp_path / "talk.jsonl"
    lines = ["/system Be kind.", "Hello", "/retry", "/nonsense", f"/save {path}", "/save", "/clear",
             "/retry", "/quit", "not said"]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    result = on("chat", "--max-new-tokens", "5")
    assert result.code == 0, result.err
    assert result.err.count("tokens in") == 2
    assert "error: /save wants the name of a file" in result.err
    assert "error: there is nothing to answer yet" in result.err
    system, user, answer = json.loads(path.read_text())["messages"]
    assert (system, user) == tuple(TALK)
    assert answer["role"] == "assistant"
    assert result.out.splitlines()[0] == answer["content"].splitlines()[0]


def test_a_pipe_of_no_text_is_named(on, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "stdin is not UTF-8 text" in on("chat", "--max-new-tokens", "5").err


def test_chat_needs_a_template(forerun, pair):
    refused = forerun("chat", "--target", pair.target, "--draft", "none", "--device", "cpu")
    assert (refused.code, "no chat template" in refused.error) == (1, True)
