"""Every command on a tiny encoder-decoder pair: the prompt is the source."""

from __future__ import annotations

import json
import re

import pytest

from sourced import SOURCES, Folders, save_folders

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return save_folders(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def models(folders):
    return ["--target", folders.target, "--draft", folders.draft, "--device", "cpu"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"source": SOURCES[0], "id": "a"}, {"prompt": SOURCES[1], "id": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture
def trace(forerun, models, prompts, tmp_path):
    path = str(tmp_path / "trace.parquet")
    done = forerun("record", *models, "--prompts", prompts, "--max-new-tokens", "8", "-o", path)
    assert done.code == 0, done.err
    return path


def test_generate(forerun, models):
    done = forerun("generate", *models, SOURCES[0], "--max-new-tokens", "8", "--json", "--compare")
    assert done.code == 0, done.err
    stats = done.json["completions"][0]["stats"]
    assert stats["source_tokens"] > 1
    assert stats["encode_seconds"] > 0
    assert done.json["compare"]["identical"]
    shown = forerun("generate", *models, SOURCES[0], "--max-new-tokens", "8")
    assert shown.out == done.json["completions"][0]["text"] + "\n"
    assert re.search(r"encoding \d+ ms", shown.err)


def test_a_file_of_sources_and_a_decoder_prompt(forerun, models, prompts, folders):
    done = forerun("generate", *models, "--prompt-file", prompts, "--jsonl", "--decoder-prompt",
                   "the cat", "--max-new-tokens", "6")  # fmt: skip
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert sorted(line["id"] for line in lines) == ["a", "b"]
    assert all(line["stats"]["prompt_tokens"] > 1 for line in lines)
    refused = forerun("generate", "--target", folders.decoder, "--draft", "none", "--prompt-file",
                      prompts)  # fmt: skip
    assert refused.code == 2
    assert 'line 1: "source" is for models with an encoder; write "prompt"' in refused.err


def test_languages_are_refused_where_there_are_none(forerun, models):
    refused = forerun("generate", *models, SOURCES[0], "--language", "de")
    assert refused.code == 2
    assert "no tokens for languages" in refused.error


def test_record_replay_and_tune(forerun, trace, tmp_path):
    costs = ["--costs", "c=4,slope=0.1"]
    done = forerun("replay", trace, *costs, "--controller", "fixed(2)", "--json")
    assert done.code == 0, done.err
    tuned = forerun("tune", trace, *costs, "--budget", "4", "-o", str(tmp_path / "best.json"))
    assert tuned.code == 0, tuned.err


@pytest.mark.usefixtures("quick_costs")
def test_audit_calibrate_and_costs(forerun, models, prompts):
    done = forerun("audit", *models, "--prompts", prompts, "--max-new-tokens", "8",
                   "--batch-size", "2", "--json")  # fmt: skip
    assert done.code == 0, done.err
    calibrated = forerun("calibrate", "easd", *models, "--data", prompts, "--max-new-tokens", "6")
    assert calibrated.code == 0, calibrated.err
    took = forerun("costs", *models, "--context", "6", "--batch", "1", "--repeats", "1", "--json")
    assert took.code == 0, took.err


@pytest.mark.slow
def test_bench_with_beam_search(forerun, models, prompts, tmp_path):
    done = forerun("bench", *models, "--prompt-file", prompts, "--max-new-tokens", "6",
                   "--controllers", "fixed(2)", "--peers", "transformers-beam(3)",
                   "-o", str(tmp_path / "out"))  # fmt: skip
    assert done.code == 0, done.err
    assert "transformers-beam(be" in done.out  # the name goes on in the next line
    assert "ams=3)" in done.out


def test_early_exits_are_refused(forerun, folders, tmp_path):
    refused = forerun("sweep", "specbound", "--target", folders.target, "--prompts", "builtin",
                      "-o", str(tmp_path / "s.json"))  # fmt: skip
    assert refused.code == 1
    assert "marian models have no layer-by-layer access" in refused.error


@pytest.mark.slow
def test_the_shipped_digest_likewise(forerun, tmp_path):
    passage = "It rained. Anton the farmer has lived in Greenhill for four years. I like it."
    made = forerun("generate", "--target", "digest", passage, "--device", "cpu")
    assert made.code == 0, made.err
    assert made.out.strip() == "Anton, a farmer, four years in Greenhill."
    done = forerun("bench", "--target", "digest", "--device", "cpu", "--prompts", "2",
                   "--controllers", "fixed(2)", "-o", str(tmp_path / "bench"))  # fmt: skip
    assert done.code == 0, done.err
    assert '"digest"' in (tmp_path / "bench" / "results.json").read_text()
    done = forerun("audit", "--target", "digest", "--device", "cpu", "--limit", "2")
    assert done.code == 0, done.err
    listed = forerun("list", "models").out
    assert "made-up passages to one line, by --target digest" in " ".join(listed.split())


def test_the_shipped_translator_needs_no_more_than_its_name(forerun, tmp_path):
    """Prompts, draft and precision come with it, at every door."""
    made = forerun("generate", "--target", "translator", "I like apples.", "--device", "cpu")
    assert made.code == 0, made.err
    assert made.out.startswith("Ich ")
    assert len(made.err.splitlines()) == 1  # the summary alone
    few = ["--target", "translator", "--device", "cpu", "--limit", "2", "--max-new-tokens", "8"]
    done = forerun("audit", *few)
    assert done.code == 0, done.err
    trace = str(tmp_path / "t.parquet")
    done = forerun("record", *few, "--prompts", "builtin:sources", "-o", trace)
    assert done.code == 0, done.err
    done = forerun("replay", trace, "--costs", "c=4,slope=0.1", "--controller", "fixed(2)")
    assert done.code == 0, done.err
    done = forerun("bench", "--target", "translator", "--draft", "block", "--device", "cpu",
                   "--prompts", "2", "--max-new-tokens", "8", "--controllers", "fixed(2)",
                   "-o", str(tmp_path / "bench"))  # fmt: skip
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert '"sources"' in json.dumps(results)
    assert "translator" in forerun("list", "models").out
    refused = forerun("generate", "--target", "./translator", "Hi")
    assert "no model folder at './translator'" in refused.error
