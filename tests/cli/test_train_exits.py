"""`forerun train-exits` on a tiny model and tiny texts."""

from __future__ import annotations

import json
import re

import pytest

from forerun.cli.shared.exit_texts import GROUP, hold_out, open_source
from forerun.errors import SettingError

WORDS = "the goats on the mountain eat grass and the boy sees them from the door of the hut "
FAST = ("--epochs", "2", "--batch", "64", "--layers", "1,2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("".join(f"Day {i}: {WORDS}\n" for i in range(60)), encoding="utf-8")
    return str(path)


@pytest.fixture
def train(forerun, pair, tmp_path):
    def run(*argv: str, out: str = "exits"):
        return forerun(
            "train-exits", "--target", pair.target, "--device", "cpu", "-o", str(tmp_path / out),
            *FAST, *argv,
        )  # fmt: skip

    return run


def test_summary_and_files(train, text, tmp_path):
    result = train("--data", text, "--tokens", "1500")
    assert result.code == 0
    first, last = result.err.splitlines()
    assert re.match(r"features of 1,\d\d\d positions after 2 layers: \d+\.\d kB in ", first)
    assert re.match(r"saved to .*exits \(\d\.\d kB\); use them with --exits ", last)
    assert "held-out positions" in result.out
    assert re.search(r"^ +1( +[\d.]+ %){4}$", result.out, re.MULTILINE)
    assert "\x1b" not in result.out
    config = json.loads((tmp_path / "exits" / "exits.json").read_text(encoding="utf-8"))
    assert (config["kind"], config["layers"], config["hidden_size"]) == ("light", [1, 2], 32)
    assert config["target"] == "target"
    training = config["training"]
    assert (training["data"], training["loss"], training["epochs"]) == ("story.txt", "hard", 2)
    assert [report["layer"] for report in training["trained"]] == [1, 2]
    assert not (tmp_path / "exits" / "cache" / "training.pt").exists()


def test_the_heads_load_for_their_model_and_no_other(train, text, pair, tmp_path):
    from forerun.errors import ModelError
    from forerun.runtime.heads import load_heads
    from forerun.runtime.layers import LayerAccess
    from forerun.runtime.load import load_model

    assert train("--data", text, "--rank", "4", "--loss", "distill").code == 0
    heads = load_heads(tmp_path / "exits", LayerAccess(load_model(pair.target, "cpu")))
    assert heads.layers == (1, 2)
    assert heads.weights[1]["down"].shape == (4, 32)
    with pytest.raises(ModelError, match="number of layers is 3, this model's is 1"):
        load_heads(tmp_path / "exits", LayerAccess(load_model(pair.draft, "cpu")))


def test_document_and_full_heads(train, text):
    result = train("--data", text, "--head", "full", "--tokens", "600", "--json")
    assert result.code == 0
    assert result.json["kind"] == "full"
    assert result.json["bytes"] > 2 * 260 * 32 * 2
    assert {"forerun", "torch"} <= result.json["versions"].keys()


def test_prompts_are_continued_by_the_target(train, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Goat {i}", "max_new_tokens": 6} for i in range(GROUP + 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    whole = train("--data", str(path), "--json", out="whole").json
    positions = whole["training"]["positions"] + whole["training"]["held_out"]
    assert GROUP < positions <= 6 * (GROUP + 3)
    texts = tmp_path / "whole" / "cache" / "texts.jsonl"
    first = texts.read_text(encoding="utf-8")
    # Cut in its second group, as by an interruption: what is missing is written again, the same.
    texts.write_text(first[: first.rindex("[[") + 9], encoding="utf-8")
    assert train("--data", str(path), "--json", out="whole").json["kind"] == "light"
    assert texts.read_text(encoding="utf-8") == first


def test_texts_in_json_lines_and_folders(train, text, tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"{i} {WORDS}"}) + "\n" for i in range(12)]
    path.write_text("".join(lines), encoding="utf-8")
    assert train("--data", str(path), "--json").json["training"]["positions"] > 500
    assert open_source(str(tmp_path)).texts == [(tmp_path / "story.txt").read_text("utf-8")]


def test_the_same_command_uses_what_is_there(train, text, monkeypatch):
    from forerun.training import features

    once = train("--data", text, "--tokens", "900", "--json").json
    monkeypatch.setattr(features, "_forward", None)  # would fail if it ran
    again = train("--data", text, "--tokens", "900", "--json").json
    assert again["training"]["trained"] == once["training"]["trained"]


def test_an_interruption_says_how_to_go_on(train, text, tmp_path, monkeypatch):
    from forerun.training import exit_heads

    real = exit_heads._Run._learn

    def cut(run, rows, factor):
        if run.step == 3:
            raise KeyboardInterrupt
        return real(run, rows, factor)

    monkeypatch.setattr(exit_heads._Run, "_learn", cut)
    result = train("--data", text, "--tokens", "900")
    assert result.code == 130
    assert result.err.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert (tmp_path / "exits" / "cache" / "training.pt").is_file()
    assert not (tmp_path / "exits" / "exits.json").exists()
    seen = []
    monkeypatch.setattr(
        exit_heads._Run, "_learn", lambda run, *r: seen.append(run.step) or real(run, *r)
    )
    assert train("--data", text, "--tokens", "900").code == 0
    assert seen[0] == 3


def test_held_out_documents():
    documents = [([i], 0) for i in range(40)]
    kept, held = hold_out(documents)
    assert [d[0][0] for d in held] == [15, 31]
    assert len(kept) == 38
    assert hold_out(documents[:3]) == (documents[:2], documents[2:3])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no texts; give --data"),
        (["--layers", "2,x"], "--layers wants numbers like 2,4,6, got '2,x'"),
        (["--layers", "3"], "layer 3 is the model's last and needs no head"),
        (["--layers", "7"], "exit layer 7 does not exist; the model's are 1 to 3"),
        (["--layers", "1,1"], "exit layers must differ"),
        (["--head", "heavy"], "head must be 'light' or 'full', got 'heavy'"),
        (["--loss", "soft"], "loss must be 'hard' or 'distill'"),
        (["--rank", "33"], "rank must be at most the hidden size, 32, got 33"),
        (["--rank", "4", "--head", "full"], "rank must be 0 for full heads"),
        (["--epochs", "0"], "epochs must be a whole number of at least 1"),
        (["--tokens", "0"], "tokens must be ≥ 1"),
        (["--minutes", "0"], "minutes must be a number > 0"),
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
    assert "python -m recipes training-prompts" in train("--data", "zoo:data").error
    assert "did you mean 'stories'" in train("--data", "builtin:storys").error
    assert "is a file; name a folder" in train("--data", text, out="story.txt").error
    with pytest.raises(SettingError, match=r"no \.txt files"):
        open_source(str(tmp_path / "empty"))
