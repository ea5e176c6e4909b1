"""`forerun calibrate`, and what the command line says of lossy rules."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from forerun.rules import RULES


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "validation.jsonl"
    path.write_text(
        '"Hello"\n{"prompt": "Good day", "max_new_tokens": 3, "temperature": 0.7}\n'
        '{"tokens": [5, 6, 7]}\n'
    )
    return str(path)


@pytest.fixture
def calibrate(forerun, pair, prompts):
    """`forerun calibrate easd` on the tiny pair and three prompts."""

    def run(*argv: str):
        given = [] if "--data" in argv else ["--data", prompts]
        return forerun("calibrate", "easd", *pair.options, "--max-new-tokens", "8", *given, *argv)

    return run


def test_summary(calibrate):
    result = calibrate()
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "3 prompts, 19 decoding steps"
    assert re.search(r"^target( +\d\.\d{3}){5}$", result.out, re.MULTILINE)
    assert re.search(r"^draft( +\d\.\d{3}){5}$", result.out, re.MULTILINE)
    assert "the 1 highest target entropies (5 % of the steps)" in result.out
    assert re.search(r"^both models above τ_H: [\d.]+ % of the steps$", result.out, re.MULTILINE)
    threshold = re.search(r"τ_H = ([\d.]+)", result.out).group(1)
    spec = re.fullmatch(r'--rule "(.*)"', lines[-1]).group(1)
    assert RULES.make(spec).entropy == float(threshold)
    assert "\x1b" not in result.out
    assert max(map(len, lines)) <= 80


def test_the_rule_it_prints_runs(calibrate, generate):
    spec = calibrate("--json").json["rule"]
    result = generate("Hello", "--max-new-tokens", "6", "--rule", spec, "--json")
    assert result.json["settings"]["rule"] == spec


def test_document_on_stdout_and_in_the_file(calibrate, pair, prompts, tmp_path):
    path = tmp_path / "easd.json"
    result = calibrate("--json", "--share", "0.2", "-o", str(path))
    assert (result.code, result.err) == (0, "")
    document = result.json
    assert json.loads(path.read_text(encoding="utf-8")) == document
    assert document["schema"] == 1
    assert (document["method"], document["share"], document["top"]) == ("easd", 0.2, 4)
    assert (document["prompts"], document["target"]["steps"]) == (3, 19)
    assert document["draft"]["steps"] == 19
    assert 0 <= document["both"] <= 1
    assert document["target"]["q99"] <= document["target"]["max"]
    assert document["entropy"] <= document["target"]["max"]
    assert document["settings"] == {
        "target": pair.target, "draft": pair.draft, "device": "cpu", "dtype": "float32",
        "chat": False, "data": prompts, "limit": None, "max_new_tokens": 8,
    }  # fmt: skip
    assert {"forerun", "torch", "transformers"} <= document["versions"].keys()
    text = calibrate("-o", str(path))
    assert text.err == f"saved to {path}\n"
    assert "τ_H" in text.out


def test_the_document_is_described(calibrate):
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    document = calibrate("--json").json
    names = [*document, *document["target"], *document["settings"]]
    assert [n for n in names if f"`{n}`" not in page and f'"{n}"' not in page] == []


def test_batches_change_nothing(calibrate):
    one, three = calibrate("--json", "--batch-size", "1"), calibrate("--json")
    assert one.json["entropy"] == pytest.approx(three.json["entropy"], abs=1e-4)
    assert one.json["draft"]["mean"] == pytest.approx(three.json["draft"]["mean"], abs=1e-4)


def test_limit_and_stdin(calibrate, prompts, monkeypatch):
    assert calibrate("--limit", "2", "--json").json["target"]["steps"] == 11
    with open(prompts, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", io.StringIO(file.read()))
    assert calibrate("--data", "-", "--json").json["target"]["steps"] == 19


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--draft", "none"], marks=pytest.mark.slow),
        ["--draft", "lookup", "--target-only"],
    ],
)
def test_the_target_alone(calibrate, generate, options):
    both = calibrate("--json").json
    document = calibrate(*options, "--json").json
    assert document["entropy"] == pytest.approx(both["entropy"], abs=1e-4)
    assert (document["draft"], document["both"]) == (None, None)
    assert document["rule"].endswith(",overlap=0,draft_entropy=False)")
    assert "the target alone decides" in calibrate(*options).out
    used = generate("Hello", "--rule", document["rule"], "--draft", "lookup", "--json")
    assert used.code == 0


def test_a_penalty_that_never_fires_is_told(calibrate, monkeypatch):
    from forerun.lab import calibrate as lab

    real = lab.easd
    monkeypatch.setattr(lab, "easd", lambda *a, **k: {**real(*a, **k), "both": 0.0})
    out = calibrate().out
    assert "both models above τ_H: 0 % of the steps" in out
    assert "never fires" in out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--draft", "lookup"], 2, "needs the draft's entropy"),
        (["--draft", "lookup(n=4)"], 2, "--target-only"),
        (["--data", "builtin:storie"], 2, "did you mean 'stories'"),
        (["--data", "/no/such.jsonl"], 1, "No such file"),
        (["--share", "0"], 2, "share must be"),
        (["--share", "nan"], 2, "share must be"),
        (["--limit", "0"], 2, "limit must be"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens must be"),
        (["--batch-size", "0"], 2, "batch size must be"),
        (["-o", "/no/such/folder/x.json"], 2, "there is no folder"),
        (["-o", "/"], 2, "is a folder"),
        (["--target", "/no/model"], 1, "no model folder"),
        (["--device", "warp"], 2, "device 'warp'"),
    ],
)
def test_mistakes_are_one_line(calibrate, argv, code, words):
    result = calibrate(*argv)
    assert result.code == code
    assert words in result.error
    assert result.out == ""


def test_bad_lines_are_numbered(calibrate, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('"fine"\n""\n')
    assert "line 2: the prompt is empty" in calibrate("--data", str(path)).error


def test_own_models_want_own_prompts(forerun, pair, prompts):
    result = forerun("calibrate", "easd", "--target", pair.target, "--draft", pair.draft)
    assert (result.code, "give --data FILE" in result.error) == (2, True)
    result = forerun("calibrate", "easd", "--target", pair.target, "--data", prompts)
    assert (result.code, "give a draft model, or --target-only" in result.error) == (2, True)


def test_an_interrupt_is_clean(calibrate, monkeypatch, tmp_path):
    from forerun.lab import calibrate as lab

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "_entropies", interrupted)
    path = tmp_path / "easd.json"
    result = calibrate("-o", str(path))
    assert (result.code, result.out, result.err) == (130, "", "")
    assert not path.exists()


def test_help(forerun):
    assert "easd" in forerun("calibrate").out
    assert "--target-only" in forerun("calibrate", "easd", "--help").out


def test_builtin_prompts_are_never_those_for_testing(forerun, monkeypatch):
    asked = []

    def interrupt(text, split, *rest, penalised):
        asked.append((text, split, penalised))
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.calibrate.find_prompts", interrupt)
    assert forerun("calibrate", "easd").code == 130
    assert asked == [("builtin:all", "val", False)]


def test_the_shipped_pair(forerun):
    document = forerun("calibrate", "easd", "--data", "builtin:chat", "--limit", "3", "--json").json
    assert (document["settings"]["target"], document["settings"]["draft"]) == ("shipped", "shipped")
    assert document["settings"]["data"] == "builtin:chat"
    assert document["prompts"] == 3
    assert document["entropy"] > document["target"]["mean"] > 0


LOSSY = ("--rule", "ears(beta=1.0)", "--temperature", "1", "--seed", "3", "--max-new-tokens", "20")


def test_drift_of_a_lossy_rule(generate):
    result = generate("Hello", *LOSSY)
    match = re.search(r"drift ([\d.]+) a token \(max ([\d.]+)\)", result.err)
    assert match, result.err
    stats = generate("Hello", *LOSSY, "--json").json["completions"][0]["stats"]
    assert 0 < stats["drift_mean"] <= stats["drift_max"] <= 1
    assert float(match.group(1)) == pytest.approx(stats["drift_mean"], rel=0.05)
    assert float(match.group(2)) == pytest.approx(stats["drift_max"], rel=0.05)
    warning = "lossy rule ears(beta=1.0): the text may differ from the target's own"
    assert result.err.count(warning) == 1
    assert "lossy" not in result.out


def test_no_drift_of_a_lossless_rule(generate):
    result = generate("Hello", "--temperature", "1", "--seed", "3", "--rounds")
    assert "drift" not in result.err
    assert "lossy" not in result.err
    [completion] = generate("Hello", "--json").json["completions"]
    assert completion["stats"]["drift_mean"] is None
    assert completion["rounds"][0]["drift"] is None


def test_drift_per_round(generate):
    lines = generate("Hello", *LOSSY, "--rounds").err.splitlines()
    lines = [line for line in lines if line.startswith("round")]
    shown = [float(re.search(r"ms  drift (\d\.\d{3})  ", line).group(1)) for line in lines]
    rounds = generate("Hello", *LOSSY, "--json").json["completions"][0]["rounds"]
    assert shown == pytest.approx([sum(r["drift"]) / r["committed"] for r in rounds], abs=6e-4)


def test_drift_of_many_prompts(generate, prompts):
    options = ("--prompt-file", prompts, *LOSSY[:4], "--max-new-tokens", "9")
    assert len(re.findall(r"drift .* a token", generate(*options).err)) == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.0004, "below 0.001"), (0.01234, "0.012"), (0.31, "0.31"), (1.0, "1")],
)
def test_small_numbers(value, shown):
    from forerun.cli.shared.faces import _small

    assert _small(value) == shown


def test_a_difference_under_a_lossy_rule_is_no_bug(generate):
    # It accepts whatever was drafted, so greedy output follows the draft.
    rule = "spec-verification(top=260,tau=100)"
    given = ("Hello", "--max-new-tokens", "12", "--controller", "fixed(3)", "--compare")
    result = generate(*given, "--rule", rule)
    assert result.code == 0
    assert "identical output: no, and it need not be: the rule is lossy" in result.err
    assert "bug" not in result.err
    compared = generate(*given, "--rule", rule, "--json").json["compare"]
    assert (compared["identical"], compared["must_match"]) == (False, False)
    assert compared["differences"] == []
