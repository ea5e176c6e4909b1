"""`forerun bench` and `forerun bench compare` on the tiny pair."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

import forerun
from forerun.cli.bench import app, split_names
from forerun.cli.shared.guard import guarded
from forerun.lab.bench.bench import Ours
from forerun.prompts import Prompt, Reader, unroll

from .conftest import Result


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('"Hello"\n"Good day"\n{"prompt": "Once", "max_new_tokens": 3}\n{"tokens": [5]}')
    return str(path)


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.delenv("FORERUN_DEBUG", raising=False)

    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = guarded(lambda: app(args=list(argv), standalone_mode=False, prog_name="bench"))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(code, out, err)

    return run


@pytest.fixture
def bench(command, pair, prompts, tmp_path):
    """Two controllers, four prompts, a few tokens."""

    def run(*argv: str, folder: str = "out") -> Result:
        given = {
            "--prompt-file": prompts, "--max-new-tokens": "6", "--controllers": "fixed(2);svip",
            "-o": str(tmp_path / folder),
        }  # fmt: skip
        rest = [word for key, value in given.items() if key not in argv for word in (key, value)]
        return command(*pair.options, *rest, *argv)

    return run


@pytest.mark.parametrize(
    ("text", "mark", "parts"),
    [
        ("a;b(x=1,y=2); c", ";", ["a", "b(x=1,y=2)", "c"]),
        ("a(b(1,2),c=3),d,,d", ",", ["a(b(1,2),c=3)", "d"]),
        ("", ",", []),
    ],
)
def test_names_are_split_outside_brackets(text, mark, parts):
    assert split_names(text, mark) == parts


def test_conversations_in_spec_benchs_format(bench, tmp_path):
    """Every turn is a prompt, behind the answers of plain decoding; figures are per category."""
    path = tmp_path / "talks.jsonl"
    talks = [
        {"question_id": 81, "category": "writing", "turns": ["Hello", "Good day"]},
        {"question_id": 82, "category": "qa", "turns": ["Once"], "reference": ["upon"]},
        {"question_id": 83, "category": "qa", "turns": ["Hello " * 99, "Good"]},
    ]
    path.write_text("\n".join(map(json.dumps, talks)))
    result = bench("--prompt-file", str(path), "--skip-long")
    assert result.code == 0, result.err
    assert result.err.splitlines()[0].startswith("left out 1 of 3 prompts: longer than the context")
    made = json.loads((tmp_path / "out" / "results.json").read_text())
    samples = [s for s in made["samples"] if s["method"] == "svip"]
    assert {(s["family"], *s["prompts"]) for s in samples} == {
        ("writing", "81"), ("writing", "81.2"), ("qa", "82"),
    }  # fmt: skip
    assert all(all(s["identical"]) for s in samples)
    refused = bench("--prompt-file", str(path), folder="other")
    assert "line 3: the prompt has 594 tokens and the context holds 128" in refused.error
    refused = bench("--prompt-file", str(path), "--skip-long", "--chat", folder="other")
    assert "needs a chat template, and this tokenizer has none" in refused.err
    path.write_text('{"turns": ["Hello", 3]}')
    assert "line 1: turns must be a list of texts" in bench("--prompt-file", str(path)).err


def test_later_turns_follow_the_plain_answers(pair):
    model = forerun.load(pair.target, pair.draft, dtype="float32")
    reader = Reader.of(model)
    talk = Prompt("Hello", {"max_new_tokens": 5}, "a", "f", later=("Good day", "Once"))
    turns = unroll(model, reader, reader.prepare([talk], turns=True))
    assert [t.id for t in turns] == ["a", "a.2", "a.3"]
    conversation = ["Hello"]
    for turn, text in zip(turns, ["Good day", "Once", ""], strict=True):
        assert turn.ids == model.encode("\n".join(conversation))
        conversation += [model.generate(turn.ids, plain=True, max_new_tokens=5).text, text]


def test_results_report_and_plots(bench, tmp_path):
    result = bench("--peers", "transformers,vllm", "--batch", "1,2")
    assert result.code == 0
    lines = result.err.splitlines()
    assert lines[0] == "skipped vllm: ModuleNotFoundError: No module named 'vllm'"
    assert lines[1].startswith("report: ")
    assert len(lines) == 2
    assert re.search(r"^fixed\(2\) +1 +\d+\.\d\d \[[\d.]+, [\d.]+\] +\d+ +100 %$", result.out, re.M)
    made = json.loads((tmp_path / "out" / "results.json").read_text())
    assert made["complete"]
    assert [m["name"] for m in made["methods"]] == ["plain", "fixed(2)", "svip", "transformers"]
    counts = {b: sum(s["batch"] == b for s in made["samples"]) for b in (1, 2)}
    assert counts == {1: 4 * 4, 2: 4 * 2}
    assert {tuple(s["identical"]) for s in made["samples"]} == {(True,), (True, True)}
    assert all(max(s["tokens"]) <= 6 for s in made["samples"])
    assert made["settings"]["families"] == ["mine"]
    assert str(tmp_path) not in json.dumps(made)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "report.html"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "vllm" in page
    assert "No module named" in page
    assert '"arithmetic": "same"' in page
    assert re.search(r"^transformers +same +1 ", result.out, re.M)


def test_the_summary_as_a_document(bench):
    result = bench("--json")
    document = result.json
    assert document["schema"] == 1
    assert "samples" not in document
    cells = {(c["family"], c["method"]) for c in document["summary"]}
    assert cells == {(f, m) for f in ("mine", "all") for m in ("plain", "fixed(2)", "svip")}
    made = document["provenance"][0]
    assert {"cpu", "threads", "versions", "date"} <= made.keys()
    assert made["target"]["sha256"] != made["draft"]["sha256"]


def test_rules_and_sampling(bench):
    document = bench("--rules", "gumbel;ears", "--temperature", "0.8", "--json").json
    assert [m["name"] for m in document["methods"]] == [
        "plain", "fixed(2)", "svip", "fixed(2) + ears", "svip + ears",
    ]  # fmt: skip
    assert [m.get("lossless") for m in document["methods"]] == [None, True, True, False, False]
    same = {c["method"]: c["identical"] for c in document["summary"]}
    assert list(same.values()) == [1.0, 1.0, 1.0, None, None]


PARROT = """
import json, sys
first = json.loads(sys.stdin.readline())
assert first["context"] and first["eos"] == sorted(first["eos"]) and first["start"] is None
ready = {"ready": True, "name": "parrot(1)", "arithmetic": "own", "rows": None}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    tokens = [[ids[-1]] * ask["max_new_tokens"] for ids in ask["prompts"]]
    print(json.dumps({"tokens": tokens, "seconds": 0.5}), flush=True)
"""


def test_a_peer_is_any_command_that_speaks_json_lines(bench, tmp_path):
    script = tmp_path / "parrot.py"
    script.write_text(PARROT)
    result = bench("--peer", f"{sys.executable} '{script}'", "--peer", "no-such-program x")
    assert result.code == 0
    assert result.err.startswith("skipped no-such-program x: ")
    assert re.search(r"^parrot\(1\) +as its users run it +1 ", result.out, re.M)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '"arithmetic": "own"' in page


def test_peers_by_name_want_the_repository(bench, monkeypatch, tmp_path):
    from forerun.lab.bench import peers

    monkeypatch.setattr(peers, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "peers.py"))
    monkeypatch.chdir(tmp_path)
    assert "not at hand" in bench("--peers", "transformers").error


def test_sampled_peers_are_skipped_with_the_reason(bench):
    document = bench("--peers", "transformers", "--temperature", "1", "--json").json
    assert document["skipped"][0]["name"] == "transformers"
    assert "greedily" in document["skipped"][0]["reason"]


def test_shipped_families(command, pair, tmp_path):
    result = command(
        *pair.options, "--families", "translation", "--split", "val", "--prompts", "1",
        "--max-new-tokens", "3", "--controllers", "fixed(1)", "-o", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.json["settings"]["families"] == ["translation"]


def test_interrupted_and_gone_on_with(bench, tmp_path, monkeypatch):
    runs = 0
    real = Ours.run

    def stops(self, tasks):
        nonlocal runs
        runs += 1
        if runs > 3 + 7:  # the warm-up, two prompts by three methods, and one more
            raise KeyboardInterrupt
        return real(self, tasks)

    monkeypatch.setattr(Ours, "run", stops)
    result = bench()
    assert result.code == 130
    assert result.err.splitlines() == ["interrupted; the same command goes on from here"]
    path = tmp_path / "out" / "results.json"
    before = json.loads(path.read_text())
    assert not before["complete"]
    assert len(before["samples"]) == 6
    assert '"complete": false' in (tmp_path / "out" / "report.html").read_text()
    monkeypatch.setattr(Ours, "run", real)
    assert bench().code == 0
    after = json.loads(path.read_text())
    assert after["complete"]
    assert after["samples"][:6] == before["samples"]
    assert len(after["samples"]) == 12
    other = bench("--seed", "5")
    assert other.code == 2
    assert "name another folder" in other.error


def test_share_of_the_oracle(bench, pair, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from forerun.engine import Sampling
    from forerun.lab.bounds import informed
    from forerun.lab.traces.costs import Cell, CostTable
    from forerun.lab.traces.record import Task, record
    from forerun.model import load

    model = load(pair.target, pair.target, device="cpu")
    how = Sampling(max_new_tokens=8)
    tasks = [Task("a", str(i), [5 + i, 9], how) for i in range(3)]
    record(model, tasks, depth=4).write(tmp_path / "t.parquet")
    CostTable((Cell.synthetic(5),)).write(tmp_path / "c.json")
    monkeypatch.setattr(informed, "GRID", informed.GRID[:8])
    given = ["--trace", str(tmp_path / "t.parquet"), "--costs", str(tmp_path / "c.json")]
    document = bench(*given, "--json").json
    cells = document["shares"]["cells"]
    assert {(c["family"], c["controller"]) for c in cells} == {
        (f, c) for f in ("a", "all") for c in ("fixed(2)", "svip")
    }
    assert all(0 < c["oracle"]["high"] <= 1 + 1e-9 for c in cells)
    assert '"shares": {' in (tmp_path / "out" / "report.html").read_text()


def test_compare(bench, command, tmp_path):
    bench()
    bench("--controllers", "fixed(2)", folder="other")
    one, other = str(tmp_path / "out"), str(tmp_path / "other" / "results.json")
    result = command("compare", one, other)
    assert (result.code, result.err) == (0, "")
    assert "fixed(2)" in result.out
    assert "svip" not in result.out
    assert "4 cells beyond noise" in result.out
    assert "wrote other texts" not in result.out
    cells = command("compare", one, one, "--json").json["cells"]
    assert {c["verdict"] for c in cells} == {"within noise"}
    assert {c["same_text"] for c in cells} == {1.0}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--batch", "0"], 2, "--batch must be whole numbers"),
        (["--batch", "1,x"], 2, "--batch must be whole numbers"),
        (["--batch", "8"], 1, "do not fill a batch of 8"),
        (["--prompts", "0"], 2, "prompts must be"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens must be"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--controllers", "gammatun"], 2, "did you mean 'gammatune'"),
        (["--controllers", ";"], 2, "controllers must be"),
        (["--rules", "standart"], 2, "did you mean 'standard'"),
        (["--peers", "transformer"], 2, "did you mean 'transformers'"),
        (["--peers", "transformers(x=1)"], 2, "unknown setting of peer"),
        (["--peer-python", "vllm"], 2, "--peer-python wants"),
        (["--peer", ""], 2, "is empty; give PROGRAM"),
        (["--peer", "'"], 2, "No closing quotation"),
        (["--trace", "x"], 2, "together with --costs"),
        (["--trace", "/no/t", "--costs", "/no/c"], 1, "No such file"),
        (["--target", "/no/model"], 1, "no model folder"),
        (["--prompt-file", "/no/file"], 1, "No such file"),
    ],
)
def test_mistakes_are_one_line(bench, tmp_path, argv, code, words):
    result = bench(*argv)
    assert result.code == code
    assert words in result.error
    assert result.out == ""
    assert not (tmp_path / "out" / "results.json").exists()


def test_mistakes_in_families_and_folders(command, pair, tmp_path):
    given = [*pair.options, "-o", str(tmp_path / "x")]
    assert "did you mean 'stories'" in command(*given, "--families", "storys").error
    assert "split must be" in command(*given, "--split", "train").error
    assert "give -o DIR" in command(*pair.options).error
    (tmp_path / "x").write_text("")
    assert "is a file; name a folder" in command(*given).error


def test_mistakes_of_compare(command, tmp_path):
    assert command("compare", "/no/a", "/no/b").code == 1
    (tmp_path / "results.json").write_text("{}")
    assert "no results file" in command("compare", str(tmp_path), str(tmp_path)).error
    for samples in ("1", "[{}]"):
        text = '{"kind": "bench", "schema": 1, "settings": {}, "methods": [], "samples": %s}'
        (tmp_path / "results.json").write_text(text % samples)
        assert "is damaged" in command("compare", str(tmp_path), str(tmp_path)).error


def test_families_of_ones_own(bench, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"Text {i}", "family": "abc"[i % 3], "id": f"p{i}"} for i in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--prompt-file", str(path), "--prompts", "2"]
    summary = bench(*given, "--families", "a,c", "--json").json["summary"]
    assert {cell["family"] for cell in summary} == {"a", "c", "all"}
    samples = json.loads((tmp_path / "out" / "results.json").read_text())["samples"]
    assert {(s["family"], *s["prompts"]) for s in samples} == {
        ("a", "p0"), ("a", "p3"), ("c", "p2"), ("c", "p5"),
    }  # fmt: skip
    assert "unknown family in" in bench(*given, "--families", "d", folder="other").error


def test_prompts_from_stdin(bench, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('"Hi"\n'))
    document = bench("--prompt-file", "-", "--json").json
    assert document["settings"]["families"] == ["stdin"]
