"""The texts that drafts are trained on by `forerun train-draft`, seen through its exit heads."""

from __future__ import annotations

import json

import pytest

from forerun import Model
from forerun.cli.shared import training_texts
from forerun.cli.shared.training_texts import GROUP, Archive, read_texts, read_written
from forerun.errors import SettingError

WORDS = "the goats on the mountain eat grass and the boy sees them from the door of the hut "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("".join(f"Day {i}: {WORDS}\n" for i in range(60)), encoding="utf-8")
    return str(path)


@pytest.fixture
def train(forerun, pair, tmp_path):
    def run(*argv: str, out: str = "exits"):
        return forerun(
            "train-draft", "exits", "--target", pair.target, "--device", "cpu", "--layers", "1,2",
            "--steps", "6", "--batch", "4", "-o", str(tmp_path / out), *argv,
        )  # fmt: skip

    return run


def test_summary_files_and_use(train, forerun, pair, text, tmp_path):
    result = train("--data", text, "--tokens", "1500")
    assert result.code == 0, result.err
    assert result.err.splitlines()[-1].startswith("saved to ")
    assert "held out: top1 0." in result.out
    assert len([line for line in result.out.splitlines() if line.count("%") == 4]) == 2
    about = json.loads((tmp_path / "exits" / "draft.json").read_text(encoding="utf-8"))
    assert (about["kind"], about["head"], about["layers"]) == ("exits", "light", [1, 2])
    assert [report["layer"] for report in about["trained"]["held_out"]["layers"]] == [1, 2]
    said = forerun("generate", "Goats", "--target", pair.target, "--draft", str(tmp_path / "exits"),
                   "--max-new-tokens", "8", "--compare", "--json")  # fmt: skip
    assert said.code == 0, said.err
    assert said.json["compare"]["identical"]


def test_a_document(train, text):
    result = train("--data", text, "--tokens", "600", "--json")
    assert result.code == 0, result.err
    assert (result.json["kind"], result.json["head"]) == ("exits", "light")
    assert result.json["settings"]["loss"] == "hard"


def test_prompts_are_continued_by_the_target(train, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Goat {i}", "max_new_tokens": 6, "family": "goats"}
             for i in range(GROUP + 3)]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    whole = train("--data", str(path), "--json", out="whole").json
    assert whole["texts"] <= GROUP + 2
    texts = tmp_path / "whole" / "texts.jsonl.gz"
    first = list(read_written(texts))
    assert [text.family for text in first] == ["goats"] * (GROUP + 3)
    # Cut in its second group, as by an interruption: what is missing is written again, the same.
    texts.write_bytes(texts.read_bytes()[:-20])
    with pytest.raises(SettingError, match="damaged"):
        list(read_written(texts))
    assert train("--data", str(path), "--json", out="whole").json["kind"] == "exits"
    assert list(read_written(texts)) == first
    # What forerun write wrote is read as it is.
    learned = train("--data", str(texts), "--json", out="read").json
    assert learned["texts"] == whole["texts"]


@pytest.mark.parametrize("runtime", ["auto", "torch"])
def test_the_default_runtime_writes_what_torch_learns_from(train, tmp_path, monkeypatch, runtime):
    pytest.importorskip("openvino")
    monkeypatch.setenv("FORERUN_RUNTIME", runtime)
    wrote, stream = [], Model.stream

    def seen(self, prompts, **how):
        wrote.append((self.target.facts.executor, how["batch_size"]))
        return stream(self, prompts, **how)

    monkeypatch.setattr(Model, "stream", seen)
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Goat {i}", "max_new_tokens": 6}) + "\n" for i in range(8)]
    path.write_text("".join(lines), encoding="utf-8")
    for _ in range(2):  # what is there is not written again
        result = train("--data", str(path), "--json")
        assert result.code == 0, result.err
        assert wrote == [({"auto": "openvino"}.get(runtime, runtime), 48)]


@pytest.mark.parametrize(("seconds", "left"), [(0.0, 4), (1e9, 0)])
def test_texts_of_a_slow_target_are_kept_as_they_come(train, tmp_path, monkeypatch, seconds, left):
    monkeypatch.setattr(training_texts, "SECONDS", seconds)
    path, texts = tmp_path / "prompts.jsonl", tmp_path / "draft" / "texts.jsonl.gz"
    lines = [json.dumps({"prompt": f"Goat {i}", "max_new_tokens": 6}) + "\n" for i in range(5)]
    path.write_text("".join(lines), encoding="utf-8")
    assert train("--data", str(path), "--json", out="draft").code == 0
    texts.write_bytes(texts.read_bytes()[:-20])  # as by an interruption
    assert len(Archive(texts, {}).lines) == left


def test_texts_in_json_lines_and_folders(train, text, tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"{i} {WORDS}"}) + "\n" for i in range(12)]
    path.write_text("".join(lines), encoding="utf-8")
    assert train("--data", str(path), "--json").json["texts"] > 5
    assert read_texts(str(tmp_path)) == [(tmp_path / "story.txt").read_text("utf-8")]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "learns from texts; give --data"),
        (["--layers", "2,x"], "exits layers must be a whole number or text"),
        (["--layers", "3"], "layer 3 is the model's last and needs no head"),
        (["--layers", "1,1"], "depths must rise from 1 to at most the target's 3 layers"),
        (["--loss", "soft"], "loss must be 'hard' or 'distill'"),
        (["--tokens", "0"], "tokens must be ≥ 1"),
    ],
)
def test_wrong_settings(train, text, argv, message):
    given = ["--data", text] if argv else []
    result = train(*given, *argv)
    assert result.code == 2
    assert message in result.error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "No such file"),
        ("short.txt", "a", "too little text"),
        ("binary.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("empty.jsonl", "", "holds no prompts"),
        ("wrong.jsonl", '{"text": 3}\n', "line 1: text must be a string"),
        ("mixed.jsonl", '{"text": "a"}\n{"prompt": "b"}\n', 'line 2: no "text"'),
        ("bad.jsonl", "{\n", "line 1: not JSON"),
    ],
)
def test_wrong_data(train, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = train("--data", str(path))
    assert result.code in (1, 2)
    assert message in result.error


def test_wrong_folders(train, text, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no .txt files" in train("--data", str(tmp_path / "empty")).error
    assert "did you mean 'stories'" in train("--data", "builtin:storys").error
    assert "is a file; name a folder" in train("--data", text, out="story.txt").error
    with pytest.raises(SettingError, match=r"no \.txt files"):
        read_texts(str(tmp_path / "empty"))
