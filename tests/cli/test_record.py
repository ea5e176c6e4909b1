"""`forerun record`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

from forerun import zoo

pytest.importorskip("pyarrow")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '"Hello"\n{"prompt": "Good day", "max_new_tokens": 3, "temperature": 0.7}\n'
        '{"tokens": [5, 6, 7], "seed": 40, "ignore_eos": true}\n'
    )
    return str(path)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "trace.parquet"


@pytest.fixture
def record(forerun, pair, prompts, out):
    """`forerun record` on the tiny pair and three prompts."""

    def run(*argv: str):
        given = [] if "--prompts" in argv else ["--prompts", prompts]
        short = [] if "--max-new-tokens" in argv else ["--max-new-tokens", "6"]
        return forerun("record", *pair.options, *given, *short, "-o", str(out), *argv)

    return run


def read(path):
    from forerun.lab.traces.trace import Trace

    return Trace.read(path)


def test_summary(record, out):
    result = record("--depth", "4")
    assert (result.code, result.err) == (0, f"saved to {out}\n")
    assert re.search(r"^mine +3 +\d+ +[\d.]+ % +\d\.\d\d$", result.out, re.MULTILINE)
    assert "of 4 drafted kept" in result.out
    assert re.search(r"writing the texts took [\d.]+ s: [\d.]+ times plain", result.out)
    trace = read(out)
    assert (trace.families, trace.ids) == (("mine",) * 3, ("line 1", "line 2", "line 3"))
    assert trace.depth == 4
    assert trace.budgets.tolist() == [6, 3, 6]
    assert trace.about["sampling"] == {
        "temperature": "0.0 … 0.0", "seed": "0 … 40", "max_new_tokens": "6 … 6",
        "ignore_eos": "False … True",
    }  # fmt: skip


def test_document(record, out, pair, tmp_path):
    result = record("--json", "--limit", "2", "--seed", "5")
    assert (result.code, result.err) == (0, "")
    document, about = result.json, read(out).about
    assert (document["schema"], document["about"]) == (1, about)
    assert document["families"]["mine"]["prompts"] == 2
    assert 0 <= document["families"]["mine"]["first_kept"] <= 1
    assert (about["prompts"], about["limit"], about["seed"]) == ("mine.jsonl", 2, 5)
    assert (about["target"]["name"], about["draft"]["name"]) == ("target", "draft")
    assert str(tmp_path) not in result.out
    assert pair.target not in result.out


def test_texts_are_those_of_generate(record, generate, out):
    record()
    trace = read(out)
    settings = ["--max-new-tokens", "6", "--draft", "none", "--json"]
    done = generate("Hello", "--seed", "0", *settings).json["completions"][0]
    assert trace.tokens[0, : trace.sizes[0]].tolist() == done["tokens"]
    settings = [*settings[2:], "--max-new-tokens", "3", "--temperature", "0.7"]
    done = generate("Good day", "--seed", "1", *settings).json["completions"][0]
    assert trace.tokens[1, : trace.sizes[1]].tolist() == done["tokens"]


def test_families_of_ones_own(forerun, record, out, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": f"Text {i}", "family": "ab"[i % 2], **({"id": i} if i < 3 else {})}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '"Hello"\n')
    families = record("--prompts", str(path), "--limit", "2", "--json").json["families"]
    assert {name: f["prompts"] for name, f in families.items()} == {"a": 2, "b": 2, "mine": 1}
    trace = read(out)
    names = list(zip(trace.families, trace.ids, strict=True))
    assert names == [("a", "0"), ("b", "1"), ("a", "2"), ("b", "line 4"), ("mine", "line 7")]
    replayed = forerun("replay", str(out), "--costs", "c=5", "--controller", "fixed", "--json").json
    assert set(replayed["controllers"][0]["families"]) == {"a", "b", "mine", "all"}


def test_ids_tell_prompts_apart(record, out, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "x", "id": "1"}\n{"prompt": "y", "id": 1}\n')
    result = record("--prompts", str(path))
    assert (result.code, out.exists()) == (1, False)
    assert "line 2: another prompt of mine has the id '1'" in result.error


@pytest.mark.slow
def test_shipped_prompts(forerun, out):
    options = ["--device", "cpu", "--max-new-tokens", "4", "--json", "-o", str(out), "--prompts"]
    document = forerun("record", *options, "builtin:all", "--limit", "2").json
    trace = read(out)
    assert set(trace.families) == set(zoo.families())
    assert {f["prompts"] for f in document["families"].values()} == {2}
    assert set(trace.ids) <= {p.id for f in zoo.families() for p in zoo.prompts(f, "val")}
    penalties = trace.about["sampling"]["repetition_penalty"]
    assert (penalties["stories"], penalties["chat"]) == (1.2, 1.0)
    assert trace.budgets.max() == 4

    more = ["--split", "test", "--limit", "1", "--repetition-penalty", "1.1"]
    about = forerun("record", *options, "builtin:stories", *more).json["about"]
    assert (about["split"], about["sampling"]["repetition_penalty"]) == ("test", 1.1)
    assert set(read(out).ids) <= {p.id for p in zoo.prompts("stories", "test")}


def test_the_file_s_own_settings_come_first(record):
    options = ["--temperature", "0.5", "--repetition-penalty", "1.3", "--json"]
    sampling = record(*options).json["about"]["sampling"]
    assert sampling["temperature"] == "0.5 … 0.5"  # the second line's is 0.7
    assert sampling["repetition_penalty"] == 1.3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_written(record, out, monkeypatch, number, code):
    from forerun.engine.loop import Engine
    from forerun.lab.traces import record as lab

    calls = []

    def interrupting(place, name, after):
        """Signals when a function begins for the n-th time."""
        real = getattr(place, name)
        calls.clear()

        def call(*args):
            calls.append(args)
            if len(calls) == after:
                os.kill(os.getpid(), number)
            return real(*args)

        return monkeypatch.context(), lambda patch: patch.setattr(place, name, call)

    record()
    whole = read(out)
    for place, name, after, kept in (
        (lab, "_draft_texts", 1, [0, 1, 2]),  # while the first batch is drafted for
        (Engine, "step", 5, [1]),  # while it is written: the second prompt has three tokens
        (Engine, "step", 2, []),
    ):
        out.unlink(missing_ok=True)
        context, apply = interrupting(place, name, after)
        with context as patch:
            apply(patch)
            result = record("--json")
        assert (result.code, result.out) == (code, "")
        if not kept:
            line = "interrupted before the first text was complete; nothing is saved\n"
            assert (result.err, out.exists()) == (line, False)
            continue
        assert result.err == (
            f"interrupted; drafting for {len(kept)} texts that are complete\n"
            f"interrupted; {out} holds {len(kept)} of 3 prompts\n"
        )
        trace = read(out)
        assert trace.about["complete"] is (len(kept) == 3)
        wanted = whole.take(kept)
        width = trace.tokens.shape[1]
        assert trace.ids == wanted.ids
        assert trace.draft_tokens.tolist() == wanted.draft_tokens[:, :width].tolist()


def test_mistakes(record, out, tmp_path, monkeypatch):
    for options, message in (
        (["--depth", "0"], "depth must be a whole number of at least 1"),
        (["--limit", "0"], "limit must be"),
        (["--seed", "-1"], "seed must be"),
        (["--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--batch-size", "0"], "batch size must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["--prompts", "builtin:storys"], "did you mean 'stories'"),
        (["--prompts", "builtin:chat", "--split", "train"], "split must be val or test"),
        (["-o", str(tmp_path)], "is a folder; name a file"),
        (["-o", str(tmp_path / "none" / "t")], "there is no folder"),
        (["--draft", "none"], "draft must be somebody who drafts"),
        (["--draft", "lookup", "--rule", "standard"], "coins need a draft model"),
    ):
        result = record(*options)
        assert (result.code, message in result.error) == (2, True), result.err
    result = record("--prompts", str(tmp_path / "none.jsonl"))
    assert (result.code, "No such file" in result.error) == (1, True)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps("a" * 200))
    result = record("--prompts", str(long))
    assert (result.code, "the context holds 128" in result.error) == (1, True)
    assert not out.exists()

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = record()
    assert (result.code, "pip install 'forerun[lab]'" in result.error) == (1, True)
    assert not out.exists()


def test_a_draft_without_a_model(record, out):
    document = record("--draft", "lookup", "--json").json
    assert document["about"]["draft"] == {"name": "LookupDrafter", "sha256": None, "hashed": None}
    trace = read(out)
    assert not trace.knows("top1")
    assert trace.lengths.max() <= trace.depth


def test_help(forerun):
    result = forerun("record", "--help")
    assert "Interrupted, it keeps the prompts that are complete." in result.out
    assert result.err == ""
