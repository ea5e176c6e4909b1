"""`forerun generate`: text, JSON, many prompts, comparison, errors."""

from __future__ import annotations

import inspect
import io
import json
import sys
from types import SimpleNamespace

import pytest

from forerun.cli import generate as command
from forerun.engine import Sampling


def test_text_alone_on_stdout(generate):
    one = generate("Hello there", "--max-new-tokens", "9")
    assert one.code == 0
    document = generate("Hello there", "--max-new-tokens", "9", "--json").json
    text = document["completions"][0]["text"]
    assert one.out == (text if text.endswith("\n") or not text else f"{text}\n")
    assert "9 tokens in" in one.err
    assert "--max-new-tokens" in one.err
    assert "colours" not in one.err


def test_json_document_keeps_its_shape(generate):
    document = generate("Hello", "--max-new-tokens", "8", "--json", "--compare").json
    assert document["schema"] == 1
    assert {"schema", "completions", "compare", "settings", "versions"} <= document.keys()
    completion = document["completions"][0]
    assert {"text", "tokens", "finish_reason", "rounds", "stats"} <= completion.keys()
    first = completion["rounds"][0]
    assert {
        "drafted", "accepted", "committed", "stopped_by", "draft_ms", "verify_ms"
    } <= first.keys()  # fmt: skip
    assert sum(r["committed"] for r in completion["rounds"]) == len(completion["tokens"]) == 8
    assert {"identical", "speedup", "plain"} <= document["compare"].keys()
    assert document["compare"]["identical"] is True
    assert len(document["compare"]["speedups"]) == 3
    assert document["compare"]["plain"]["completions"][0]["tokens"] == completion["tokens"]
    assert document["settings"]["controller"] == "auto"
    assert document["settings"]["lossless"] is True
    assert document["settings"]["sampling"][0]["max_new_tokens"] == 8
    assert {"forerun", "python", "torch", "transformers"} <= document["versions"].keys()


def test_json_without_comparison(generate):
    result = generate("Hello", "--max-new-tokens", "2", "--json", "--logit-bias", "5=-inf")
    assert result.json["compare"] is None
    assert result.json["settings"]["sampling"][0]["logit_bias"] == {"5": "-inf"}
    assert result.err == ""


def test_comparison_says_identical(generate):
    result = generate("Hello", "--max-new-tokens", "12", "--compare", "--controller", "fixed(3)")
    assert result.code == 0
    assert "× the speed of plain decoding" in result.err
    assert "identical output: yes" in result.err


def test_sampling_need_not_be_identical(generate):
    result = generate(
        "Hello", "--max-new-tokens", "24", "--compare", "--temperature", "1", "--seed", "3"
    )
    assert result.code == 0
    assert "identical output: yes" in result.err or "need not be" in result.err


def test_seed_repeats(generate):
    options = ("Hello", "--temperature", "1", "--max-new-tokens", "16", "--seed", "5", "--json")
    first, second = generate(*options), generate(*options)
    assert first.json["completions"][0]["tokens"] == second.json["completions"][0]["tokens"]


@pytest.mark.parametrize(("near_tie", "code"), [(True, 0), (False, 1)])
def test_greedy_difference_is_explained(generate, monkeypatch, near_tie, code):
    from forerun.cli import compare

    found = compare.Difference(0, 4, near_tie, "differs from output token 4 on: because")
    real = compare.compare

    def differing(*args, **kwargs):
        done = real(*args, **kwargs)
        return compare.replace(done, identical=False, differences=[found])

    monkeypatch.setattr(compare, "compare", differing)
    result = generate("Hello", "--max-new-tokens", "4", "--compare")
    assert result.code == code
    assert "identical output: NO" in result.err
    assert "because" in result.err
    assert ("error: greedy output differs" in result.err) == (near_tie is False)


def test_audit_is_asked(pair):
    from forerun.cli.compare import _differences
    from forerun.cli.inputs import Row
    from forerun.cli.run import load_job
    from forerun.lab import audit

    job = load_job(pair.target, "none", "fixed", "standard", device="cpu")
    row = Row("ab", [3, 4], Sampling())
    [told] = _differences(job, [row], [[1, 2, 3]], [[1, 2, 200]])
    assert told.position == 2
    assert told.near_tie is False
    biased = Row("ab", [3, 4], Sampling(presence_penalty=1))
    [told] = _differences(job, [biased], [[1, 2, 3]], [[1, 2, 200]])
    assert (told.position, told.near_tie) == (2, False)
    # Far apart by the raw logits, tied with the bias: the request's own settings are judged.
    logits = audit._logits(job.model.target, [3, 4, 1, 2], 1, 1)
    tie = Sampling(logit_bias={3: 100 - float(logits[3]), 200: 100 - float(logits[200])})
    [told] = _differences(job, [Row("ab", [3, 4], tie)], [[1, 2, 3]], [[1, 2, 200]])
    assert told.near_tie is True


def test_rounds(generate):
    result = generate("Hello", "--max-new-tokens", "10", "--rounds", "--controller", "fixed(2)")
    lines = [line for line in result.err.splitlines() if line.startswith("round")]
    assert len(lines) >= 4
    assert "drafted  2" in lines[0]
    assert any("[-" in line for line in lines), "rejected words are marked"
    text = generate("Hello", "--max-new-tokens", "10").out
    assert result.out == text


def test_prompt_from_stdin(generate, monkeypatch):
    given = generate("Hello", "--max-new-tokens", "4").out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert generate("-", "--max-new-tokens", "4").out == given


def test_prompt_file(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"Hello"\n\n{"prompt": "Good day", "max_new_tokens": 3, "stop": "zzz"}\n'
        '{"tokens": [5, 6, 7], "temperature": 0.8, "seed": 1, "logit_bias": {"9": -3}}\n'
    )
    options = ("--prompt-file", str(path), "--max-new-tokens", "6", "--batch-size", "2")
    document = generate(*options, "--json").json
    assert [len(c["tokens"]) for c in document["completions"]] == [6, 3, 6]
    alone = generate("Hello", "--max-new-tokens", "6", "--json").json
    assert document["completions"][0]["tokens"] == alone["completions"][0]["tokens"]
    text = generate(*options)
    assert text.err.startswith("3 prompts")
    assert text.out.startswith(alone["completions"][0]["text"])


def test_options_reach_sampling(generate):
    document = generate(
        "Hello", "--max-new-tokens", "5", "--min-new-tokens", "2", "--temperature", "0.7",
        "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1",
        "--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--logit-bias", "7=2.5",
        "--seed", "4", "--stop", "QQ", "--stop", "RR", "--ignore-eos", "--json",
    ).json  # fmt: skip
    assert document["settings"]["sampling"] == [
        {
            "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01,
            "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
            "logit_bias": {"7": 2.5}, "seed": 4, "max_new_tokens": 5, "min_new_tokens": 2,
            "stop": ["QQ", "RR"], "eos": None, "ignore_eos": True,
        }
    ]  # fmt: skip


def test_defaults_are_those_of_sampling():
    for name, parameter in inspect.signature(command).parameters.items():
        if name in Sampling.__dataclass_fields__ and name not in ("logit_bias", "stop"):
            assert parameter.default == getattr(Sampling(), name), name


def test_context_full_is_a_result(generate):
    document = generate("Hello", "--max-new-tokens", "500", "--ignore-eos", "--json").json
    assert document["completions"][0]["finish_reason"] == "context"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "no prompt"),
        ([""], 1, "the prompt is empty"),
        (["x" * 200], 1, "the context holds 128"),
        (["x", "--prompt-file", "y"], 2, "not both"),
        (["--prompt-file", "/no/such.jsonl"], 1, "No such file"),
        (["x", "--controller", "gamatune"], 2, "did you mean 'gammatune'"),
        (["x", "--controller", "gammatune(etta=1)"], 2, "did you mean 'eta'"),
        (["x", "--controller", "fixed(-1)"], 2, "length must be"),
        (["x", "--rule", "standart"], 2, "did you mean 'standard'"),
        (["x", "--rule", "exact", "--temperature", "1"], 2, "needs temperature 0"),
        (["x", "--temperature", "-1"], 2, "temperature must be"),
        (["x", "--max-new-tokens", "0"], 2, "max_new_tokens must be"),
        (["x", "--max-new-tokens", "many"], 2, "--max-new-tokens"),
        (["x", "--batch-size", "0"], 2, "batch size must be"),
        (["x", "--logit-bias", "5"], 2, "ID=VALUE"),
        (["x", "--logit-bias", "999=1"], 2, "vocabulary"),
        (["x", "--device", "warp"], 2, "device 'warp'"),
        (["x", "--dtype", "float7"], 2, "unknown dtype"),
        (["x", "--target", "/no/model"], 1, "no model folder"),
        (["x", "--draft", "lokup(n=2)"], 2, "did you mean 'lookup'"),
        (["x", "--nonsense"], 2, "--nonsense"),
        (["a\udcff"], 1, "Unicode"),
    ],
)
def test_mistakes_are_one_line(generate, argv, code, words):
    result = generate(*argv)
    assert result.code == code
    assert words in result.error
    assert result.out == ""


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("{not json", 2, "not JSON"),
        ("17", 2, "expected a string or an object"),
        ('{"temperature": 1}', 2, 'give "prompt"'),
        ('{"prompt": "x", "tokens": [1]}', 2, 'give "prompt"'),
        ('{"prompt": 5}', 2, "prompt must be a string"),
        ('{"tokens": ["x"]}', 2, "tokens must be a list"),
        ('{"prompt": ""}', 1, "the prompt is empty"),
        ('{"prompt": "x", "temprature": 1}', 2, "did you mean 'temperature'"),
        ('{"prompt": "x", "temperature": "hot"}', 2, "temperature must be a number"),
        ('{"prompt": "x", "top_k": 1.5}', 2, "top_k must be an integer"),
        ('{"prompt": "x", "ignore_eos": 1}', 2, "ignore_eos must be true or false"),
        ('{"prompt": "x", "stop": 5}', 2, "stop must be"),
        ('{"prompt": "x", "eos": 5}', 2, "eos must be"),
        ('{"prompt": "x", "logit_bias": [1]}', 2, "logit_bias must map"),
        ('{"prompt": "x", "top_p": 2}', 2, "top_p must be"),
    ],
)
def test_bad_lines_are_numbered(generate, tmp_path, line, code, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    result = generate("--prompt-file", str(path))
    assert result.code == code
    assert "line 2: " in result.error
    assert words in result.error


def test_file_that_is_not_text(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in generate("--prompt-file", str(path)).error
    path.write_text("\n")
    assert "holds no prompts" in generate("--prompt-file", str(path)).error
    assert generate("--prompt-file", str(tmp_path)).code == 1


def test_unexpected_error_is_one_line_with_a_hint(generate, monkeypatch):
    from forerun.cli import play

    monkeypatch.setattr(play, "run", lambda *a, **k: 1 / 0)
    result = generate("x")
    assert result.code == 1
    assert "unexpected ZeroDivisionError" in result.error
    assert "FORERUN_DEBUG=1" in result.error


def test_interrupt_keeps_what_was_written(generate, monkeypatch):
    from forerun.cli import play

    real = play.run

    def interrupted(job, rows, *, on_event, **rest):
        def stop(index, event):
            on_event(index, event)
            raise KeyboardInterrupt

        return real(job, rows, on_event=stop, **rest)

    monkeypatch.setattr(play, "run", interrupted)
    result = generate("Hello", "--max-new-tokens", "9")
    assert result.code == 130
    assert result.out.endswith("\n")
    assert len(result.out) > 1
    assert "error" not in result.err


def test_json_escapes_are_json(generate):
    document = generate("Hello", "--max-new-tokens", "40", "--temperature", "2", "--json")
    assert json.loads(document.out)["completions"][0]["text"]


def test_plain_drafter(generate):
    result = generate("Hello", "--draft", "none", "--max-new-tokens", "4", "--json")
    rounds = result.json["completions"][0]["rounds"]
    assert [r["drafted"] for r in rounds] == [0] * 4


def test_row_defaults():
    from forerun.cli.inputs import prepare

    model = SimpleNamespace(encode=lambda p: list(p), target=SimpleNamespace(limit=9))
    model.tokenizer = None
    from forerun.cli.inputs import Request

    [row] = prepare(model, [Request([1, 2])], {"temperature": 0.5})
    assert row.text == "[1, 2]"
    assert row.sampling.temperature == 0.5
