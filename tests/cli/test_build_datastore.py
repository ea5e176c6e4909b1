"""`forerun build-datastore` on the tiny pair, and the drafter that reads what it wrote."""

from __future__ import annotations

import json

import pytest

from forerun.cli import main

from .conftest import Result


@pytest.fixture
def forerun(capsys):
    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = main(list(argv))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(code, out, err)

    return run


def test_a_datastore_is_drafted_from(forerun, pair, tmp_path):
    store, texts = str(tmp_path / "store.safetensors"), tmp_path / "texts.jsonl"
    how = ["--target", pair.target, "--device", "cpu", "--max-new-tokens", "12", "--json"]
    plain = forerun("generate", "Hello", *how, "--draft", "none").json
    text = "Hello" + plain["completions"][0]["text"]
    texts.write_text("\n".join(json.dumps({"text": t}) for t in (text, "Something else.")))
    made = forerun("build-datastore", "--data", str(texts), "-o", store, "--target", pair.target)
    assert made.code == 0, made.err
    assert "of 2 text(s)" in made.err
    fast = forerun("generate", "Hello", *how, "--draft", f"rest('{store}')", "--controller",
                   "fixed(4)").json  # fmt: skip
    assert fast["completions"][0]["text"] == plain["completions"][0]["text"]
    assert fast["completions"][0]["stats"]["accepted"] > 0


def test_what_is_no_text_is_refused(forerun, pair, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", ["-o", str(tmp_path / "x"), "--target", pair.target]
    prompts.write_text('"Hello"')
    assert (
        "holds prompts; give texts"
        in forerun("build-datastore", "--data", str(prompts), *out).error
    )
    (tmp_path / "empty.txt").write_text("")
    refused = forerun("build-datastore", "--data", str(tmp_path / "empty.txt"), *out)
    assert "at least one token" in refused.error
    assert "≥ 1" in forerun("build-datastore", "--data", "x", *out, "--tokens", "0").error
    assert "is no datastore" in forerun("generate", "Hello", "--draft", "rest('nowhere')").error
