"""`forerun generate`: text, JSON, many prompts, comparison, errors."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import forerun as package
from forerun.engine import Sampling

OWN = f"{Path(package.__file__).parent}/"


def test_text_alone_on_stdout(generate):
    one = generate("Hello there", "--max-new-tokens", "9")
    assert one.code == 0
    document = generate("Hello there", "--max-new-tokens", "9", "--json").json
    text = document["completions"][0]["text"]
    assert one.out == (text if text.endswith("\n") or not text else f"{text}\n")
    assert "9 tokens in" in one.err
    assert "--max-new-tokens" in one.err
    assert "colours" not in one.err


def test_a_prompt_passes_few_functions_and_no_file_twice(generate):
    """Counted are own functions that are given the text, or a `Prompt` of it, alone or in a list;
    a file is entered where one of another file calls into it."""
    text, passed, entered, files = "Hello there", [], [], set()

    def holds(value: object, depth: int = 2) -> bool:
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, (list, tuple)):
            return depth > 0 and any(holds(part, depth - 1) for part in value)
        own = getattr(value, "content", value)
        return isinstance(own, str) and own == text

    def watch(frame, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OWN):  # a clone's folder has the name
            return
        if code.co_flags & inspect.CO_OPTIMIZED:  # a function's, no module's or class's
            files.add(code.co_filename)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 12)
        if any(holds(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
            file = code.co_filename.removeprefix(OWN)
            passed.append((file, code.co_qualname))
            if frame.f_back is None or frame.f_back.f_code.co_filename != code.co_filename:
                entered.append(file)

    sys.setprofile(watch)
    try:
        assert generate(text, "--max-new-tokens", "2").code == 0
    finally:
        sys.setprofile(None)
    assert 8 <= len({*passed}) <= 15, passed
    assert len(entered) == len({*entered}), entered
    assert 40 <= len(files) <= 90, files


def test_what_a_draft_folder_holds_is_in_one_line(forerun, pair, tmp_path):
    """Unless it is a model, as which any other folder is taken."""
    from forerun.runtime.drafts import About, save_draft
    from forerun.runtime.eagle import EagleHead

    own = {**EagleHead(64, 32, 5, 32).state_dict(), "tokens": torch.arange(5, dtype=torch.int32)}
    save_draft(tmp_path, About("eagle", None, {"depths": [1]}), own)
    options = ("--target", pair.target, "--draft", str(tmp_path), "--max-new-tokens", "2", "--json")
    result = forerun("generate", "x", *options)
    assert result.err == f"{tmp_path}: trained by forerun for eagle\n", "and nothing else"


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
    from forerun.lab import paired
    from forerun.lab.audit import Difference

    real = paired.paired
    message = Difference(4, (1, 2), 0.5, 0.25, near_tie).message

    def differing(*args, **kwargs):
        difference = {"request": 0, "position": 4, "near_tie": near_tie, "message": message}
        return {**real(*args, **kwargs), "identical": False, "differences": [difference]}

    monkeypatch.setattr(paired, "paired", differing)
    result = generate("Hello", "--max-new-tokens", "4", "--compare")
    assert result.code == code
    assert "identical output: NO" in result.err
    assert "prompt 1: differs from output token 4 on" in result.err
    assert ("error: greedy output differs" in result.err) == (near_tie is False)


def test_audit_is_asked(pair):
    import forerun
    from forerun.lab import audit

    model = forerun.load(pair.target, "none", device="cpu")
    for sampling in (Sampling(), Sampling(presence_penalty=1)):
        difference = audit.explain(model, [3, 4], [1, 2, 3], [1, 2, 200], sampling)
        assert (difference.position, difference.near_tie) == (2, False)
    # Far apart by the raw logits, tied with the bias: the request's own settings are judged.
    logits = audit._logits(model.target, [3, 4, 1, 2], 1, 1)
    tie = Sampling(logit_bias={3: 100 - float(logits[3]), 200: 100 - float(logits[200])})
    assert audit.explain(model, [3, 4], [1, 2, 3], [1, 2, 200], tie).near_tie is True


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
    assert text.out.startswith(f"==> prompt 1 <==\n{alone['completions'][0]['text']}\n")


def test_texts_of_many_prompts_are_told_apart(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "id": "first"}\n"Good day"\n')
    text = generate("--prompt-file", str(path), "--max-new-tokens", "4")
    one, two = (generate(prompt, "--max-new-tokens", "4").out for prompt in ("Hello", "Good day"))
    assert text.out == f"==> prompt 1 (first) <==\n{one}\n==> prompt 2 <==\n{two}"
    path.write_text('"Hello"\n')
    assert generate("--prompt-file", str(path), "--max-new-tokens", "4").out == one


def test_prompts_bring_their_names_along(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "Hello", "id": "a-1", "family": "greetings", "meta": {"from": ["x", 2]}}\n'
        '{"tokens": [5, 6], "id": 17}\n"Hi"\n',
        encoding="utf-8-sig",
    )
    options = ("--prompt-file", str(path), "--max-new-tokens", "2")
    names = ("index", "id", "family", "meta")
    wanted = [(0, "a-1", "greetings", {"from": ["x", 2]}), (1, 17, None, None), (2, *[None] * 3)]
    document = generate(*options, "--json").json
    assert document["complete"] is True
    assert [tuple(c[n] for n in names) for c in document["completions"]] == wanted
    lines = [json.loads(line) for line in generate(*options, "--jsonl").out.splitlines()]
    assert sorted(tuple(c[n] for n in names) for c in lines) == wanted


def test_marks_before_utf8_are_no_text(generate, monkeypatch, tmp_path):
    given = generate("Hello", "--max-new-tokens", "4").out
    for text, options in (("Hello\n", ["-"]), ('"Hello"\n', ["--prompt-file", "-"])):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"\ufeff{text}"))
        assert generate(*options, "--max-new-tokens", "4").out == given


@pytest.fixture
def no_weights(monkeypatch):
    """Loading a model is an error."""

    def loaded(*args, **rest):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("forerun.runtime.runtimes.load_model", loaded)


def refused_as_second_line(generate, forerun, pair, tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    for result in (
        generate("--prompt-file", str(path)),
        forerun("audit", *pair.options, "--prompts", str(path)),
    ):
        assert (result.code in (1, 2), result.out) == (True, "")
        assert f"line 2: {words}" in result.error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x", "temperature": -1}', "temperature must be"),
        ('{"prompt": "x", "id": 1.5}', "id must be text or a whole number"),
        ('{"prompt": "x", "id": ""}', "id must be text or a whole number"),
        ('{"prompt": "x", "family": 5}', "family must be text"),
        ('{"prompt": "x", "family": "all"}', "family must be text other than 'all'"),
    ],
)
def test_bad_prompts_are_told_before_models_are_loaded(
    generate, forerun, pair, no_weights, tmp_path, line, words
):
    refused_as_second_line(generate, forerun, pair, tmp_path, line, words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('""', "the prompt is empty"),
        ('{"tokens": []}', "the prompt is empty"),
        (json.dumps("x" * 128), "the prompt has 128 tokens and the context holds 128"),
    ],
)
def test_prompts_that_do_not_fit_are_named(generate, forerun, pair, tmp_path, line, words):
    refused_as_second_line(generate, forerun, pair, tmp_path, line, words)


def test_a_folder_without_a_tokenizer_is_told_by_loading(forerun, pair, tmp_path):
    import shutil

    folder = shutil.copytree(pair.target, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "tokenizer" in forerun("generate", "x", "--target", str(folder)).error


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
            "stop": ["QQ", "RR"], "bad_words": [], "allowed_tokens": None, "eos": None,
            "ignore_eos": True, "constraint": None,
        }
    ]  # fmt: skip


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
        (["x", "--target", __file__], 1, "is a file, and no GGUF file"),
        (["x", "--draft", "lokup(n=2)"], 2, "did you mean 'lookup'"),
        (["x", "--nonsense"], 2, "--nonsense"),
        (["x", "--jsonl", "--json"], 2, "leave --json and --compare out"),
        (["x", "--jsonl", "--compare"], 2, "leave --json and --compare out"),
        (["x", "-o", "file"], 2, "add --jsonl"),
        (["x", "--jsonl", "-o", "/no/folder/file"], 2, "there is no folder"),
        (["a\udcff"], 1, "half a character"),
        (["a\0b"], 2, "NUL or half a character"),
        (["\ud800"], 2, "NUL or half a character"),
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
        ("[" * 9999, 2, "too deep"),
        ("17", 2, "expected a string or an object"),
        ('{"temperature": 1}', 2, 'give "prompt"'),
        ('{"prompt": "x", "tokens": [1]}', 2, 'give "prompt"'),
        ('{"prompt": 5}', 2, "prompt must be a string"),
        ('{"tokens": ["x"]}', 2, "tokens must be a list"),
        ('{"prompt": ""}', 1, "the prompt is empty"),
        ('{"prompt": "x", "temprature": 1}', 2, "did you mean 'temperature'"),
        ('{"prompt": "x", "temperature": "hot"}', 2, "temperature must be a number"),
        ('{"prompt": "x", "top_k": 1.5}', 2, "top_k must be a whole number"),
        ('{"prompt": "x", "ignore_eos": 1}', 2, "ignore_eos must be true or false"),
        ('{"prompt": "x", "stop": 5}', 2, "stop must be"),
        ('{"prompt": "x", "eos": "end"}', 2, "eos must be"),
        ('{"prompt": "x", "logit_bias": [1]}', 2, "logit_bias must be a mapping"),
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
    from forerun.cli.shared import faces

    monkeypatch.setattr(faces.Face, "event", lambda *a: 1 / 0)
    result = generate("x")
    assert result.code == 1
    assert "unexpected ZeroDivisionError" in result.error
    assert "FORERUN_DEBUG=1" in result.error


def test_interrupt_keeps_what_was_written(generate, monkeypatch):
    from forerun.cli.shared import faces

    def stop(face, place, event):
        raise KeyboardInterrupt

    monkeypatch.setattr(faces.Face, "event", stop)
    result = generate("Hello", "--max-new-tokens", "9")
    assert result.code == 130
    assert result.out.endswith("\n")
    assert len(result.out) > 1
    assert "error" not in result.err


@pytest.fixture
def many(tmp_path):
    """Six prompts of different lengths of output."""
    path = tmp_path / "many.jsonl"
    lines = [{"prompt": f"Text {i}", "id": f"p{i}", "max_new_tokens": 3 + i} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def interrupt(monkeypatch):
    """Send a signal to this process while the n-th completion is being passed on."""
    from forerun.cli.shared import faces

    def set_up(number, after):
        done, real = 0, faces.Face.event

        def watch(face, place, event):
            nonlocal done
            done += event.completion is not None
            if done == after and event.completion is not None:
                os.kill(os.getpid(), number)
            real(face, place, event)

        monkeypatch.setattr(faces.Face, "event", watch)

    yield set_up
    monkeypatch.undo()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_closes_the_document(generate, interrupt, many, number, code):
    options = ("--prompt-file", many, "--batch-size", "2", "--draft", "none")
    whole = generate(*options, "--json").json["completions"]
    interrupt(number, after=2)
    result = generate(*options, "--json")
    assert result.code == code
    document = result.json
    assert document["complete"] is False
    done = document["completions"]
    assert 2 <= len(done) < 6
    assert result.err == f"interrupted; {len(done)} of 6 prompts are complete\n"
    assert [c["tokens"] for c in done] == [whole[c["index"]]["tokens"] for c in done]


def test_an_interrupt_shows_texts_that_waited(generate, interrupt, tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"prompt": "Hello", "max_new_tokens": 60}\n' + '"Good day"\n' * 3)
    interrupt(signal.SIGINT, after=2)
    options = ("--max-new-tokens", "4", "--batch-size", "2", "--draft", "none", "--ignore-eos")
    result = generate("--prompt-file", str(path), *options)
    assert result.code == 130
    assert "prompt 1" not in result.out
    assert "==> prompt 2 <==" in result.out
    assert "==> prompt 3 <==" in result.out


def test_an_error_on_the_way_keeps_what_is_complete(generate, monkeypatch, many):
    from forerun.cli.shared import faces
    from forerun.errors import ModelError

    real = faces.Face.event

    def watch(face, place, event):
        real(face, place, event)
        if place == 2:
            raise ModelError("the weights melted")

    monkeypatch.setattr(faces.Face, "event", watch)
    result = generate("--prompt-file", many, "--batch-size", "2", "--json")
    assert (result.code, result.error) == (1, "error: the weights melted")
    assert result.json["complete"] is False
    assert {c["index"] for c in result.json["completions"]} >= {0}


def test_a_second_interrupt_does_not_wait():
    from forerun.cli.shared import guard

    reached = []

    def press(times):
        with guard.held() as caught:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(caught.requested)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            press(times)
    assert reached == [True, True], "the second of two ends it at once"


def test_lines_are_completions(generate, many):
    options = ("--prompt-file", many, "--batch-size", "4", "--draft", "none")
    result = generate(*options, "--jsonl")
    assert result.code == 0
    assert result.err.startswith("6 prompts · 33 tokens in 33 rounds")
    lines = {line["index"]: line for line in map(json.loads, result.out.splitlines())}
    for completion in generate(*options, "--json").json["completions"]:
        line = lines.pop(completion["index"])
        assert line.pop("schema") == 1
        assert len(line.pop("key")) == 16
        assert line.keys() == completion.keys()
        same = ("id", "text", "tokens", "finish_reason", "origins")
        assert [line[n] for n in same] == [completion[n] for n in same]
    assert lines == {}


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_file_of_lines_goes_on(generate, interrupt, monkeypatch, many, tmp_path, cut):
    options = ("--prompt-file", many, "--batch-size", "2", "--draft", "none")
    whole = generate(*options, "--json").json["completions"]
    out = tmp_path / "out.jsonl"
    options = (*options, "--jsonl", "-o", str(out))
    interrupt(signal.SIGTERM, after=3)
    result = generate(*options)
    assert (result.code, result.out) == (143, "")
    assert re.fullmatch(
        r"interrupted; [345] of 6 prompts are complete; the same command goes on from here\n",
        result.err,
    )
    monkeypatch.undo()
    kept = out.read_bytes()
    out.write_bytes(kept[: len(kept) - cut])
    there = len(kept.splitlines()) - (cut > 0)
    result = generate(*options)
    assert result.err.startswith(f"{out} holds {there} of 6 prompts; going on\n")
    assert out.read_bytes().splitlines()[:there] == kept.splitlines()[:there]
    lines = sorted(map(json.loads, out.read_text().splitlines()), key=lambda line: line["index"])
    assert [line["tokens"] for line in lines] == [c["tokens"] for c in whole]
    size = out.stat().st_size
    assert generate(*options).code == 0
    assert out.stat().st_size == size


def test_a_file_of_other_things_is_left_alone(generate, many, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--prompt-file", many, "--jsonl", "-o", str(out), "--draft", "none")
    for text in ("my diary", "my diary\n", '{"schema": 1, "index": x}\n'):
        out.write_text(text)
        result = generate(*options)
        assert (result.code, "name another file" in result.error) == (2, True)
        assert out.read_text() == text
    out.unlink()
    assert generate(*options).code == 0
    size = out.stat().st_size
    for other in (["--temperature", "0.5"], ["--controller", "fixed"], ["--rule", "exact"]):
        assert "of other prompts, settings or models" in generate(*options, *other).error
    assert out.stat().st_size == size


def test_one_token_in_one_round(generate):
    assert "1 token in 1 round ·" in generate("Hello", "--max-new-tokens", "1").err


def test_json_escapes_are_json(generate):
    options = ("--temperature", "2", "--ignore-eos", "--max-new-tokens", "40", "--json")
    assert json.loads(generate("Hello", *options).out)["completions"][0]["text"]


def test_plain_drafter(generate):
    result = generate("Hello", "--draft", "none", "--max-new-tokens", "4", "--json")
    rounds = result.json["completions"][0]["rounds"]
    assert [r["drafted"] for r in rounds] == [0] * 4


def test_row_defaults():
    from forerun.prompts import Prompt, Reader

    [row] = Reader(None, 9).prepare([Prompt([1, 2])], {"temperature": 0.5})
    assert row.text == "[1, 2]"
    assert row.sampling.temperature == 0.5


def test_log_probabilities_on_request(generate):
    import math

    done = generate("Hello", "--max-new-tokens", "3", "--logprobs", "2", "--json").json
    [completion] = done["completions"]
    assert len(completion["logprobs"]) == len(completion["tokens"]) == 3
    for token, logprobs in zip(completion["tokens"], completion["logprobs"], strict=True):
        best = logprobs["top"][0]  # greedy: the token is the likeliest
        assert (best["token"], best["logprob"]) == (token, logprobs["logprob"])
        assert sum(math.exp(entry["logprob"]) for entry in logprobs["top"]) <= 1 + 1e-6
    assert (
        "logprobs"
        not in generate("Hello", "--max-new-tokens", "3", "--json").json["completions"][0]
    )
    refused = generate("Hello", "--logprobs", "2")
    assert refused.code == 2
    assert "--logprobs is part of JSON; add --json or --jsonl" in refused.err


def test_the_usual_runtime_is_openvino_in_float32(generate, monkeypatch):
    import pytest

    pytest.importorskip("openvino")
    monkeypatch.delenv("FORERUN_RUNTIME")
    settings = ["Hello", "--max-new-tokens", "3", "--device", "cpu", "--json"]
    assert generate(*settings).json["settings"]["runtime"] == "openvino"
    assert generate(*settings, "--dtype", "bfloat16").json["settings"]["runtime"] == "torch"


def test_runtimes_write_the_same_text(generate):
    import pytest

    pytest.importorskip("openvino")
    same = [
        generate("Hello", "--max-new-tokens", "12", "--runtime", name, "--json").json
        for name in ("torch", "openvino")
    ]
    assert same[0]["completions"][0]["tokens"] == same[1]["completions"][0]["tokens"]
    unknown = generate("Hello", "--runtime", "opnvino")
    assert unknown.code == 2
    assert "unknown runtime 'opnvino'; did you mean 'openvino'?" in unknown.err


@pytest.fixture(scope="module")
def damaged(pair, tmp_path_factory):
    """The target with one row of its embedding that is no number."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("damaged") / "target"
    shutil.copytree(pair.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.embed_tokens.weight"][ord("a") - 33] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return ["--target", str(folder), "--draft", "none", "--device", "cpu", "--runtime", "torch"]


def test_a_damaged_model_gives_the_reason_and_rc_1(forerun, damaged):
    text = forerun("generate", "abc", *damaged)
    assert text.code == 1
    assert "the target's logits are no numbers" in text.err
    document = forerun("generate", "abc", "--json", *damaged)
    assert document.code == 1
    assert json.loads(document.out)["complete"] is False


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_named(generate):
    done = generate("a", "--jsonl", "-o", "/dev/full", "--max-new-tokens", "2")
    assert done.code != 0
    assert "/dev/full" in done.err
