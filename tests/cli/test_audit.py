"""`forerun audit`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from forerun.errors import PromptError, SettingError, UnknownNameError
from forerun.lab.audit import summary
from forerun.lab.bench.peers import Peer
from forerun.model import Model
from forerun.prompts import Reader, find_prompts, seeded
from forerun.zoo import PENALTY, families
from forerun.zoo import prompts as shipped


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '"Hello there"\n\n{"prompt": "Good day", "max_new_tokens": 3, "temperature": 0.7}\n'
        '{"tokens": [5, 6, 7], "repetition_penalty": 1.3}\n'
    )
    return str(path)


@pytest.fixture
def audit(forerun, pair, prompts):
    """`forerun audit` on the tiny pair and three prompts."""

    def run(*argv: str):
        given = [] if "--prompts" in argv else ["--prompts", prompts]
        return forerun("audit", *pair.options, "--max-new-tokens", "8", *given, *argv)

    return run


def plant(monkeypatch, near_tie: bool = False):
    """Speculative text gets a wrong third token."""
    from forerun.lab import audit as lab

    own, explain = Model.generate, lab.explain

    def generate(self, prompts, *, plain, **how):
        done = own(self, prompts, plain=plain, **how)
        for completion in () if plain else done:
            completion.tokens[2] = (completion.tokens[2] + 1) % 200
        return done

    monkeypatch.setattr(Model, "generate", generate)
    if near_tie:
        monkeypatch.setattr(lab, "explain", lambda *a: replace(explain(*a), near_tie=True))


def test_identical(audit):
    result = audit("--batch-size", "2", "--controller", "fixed(3)")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[-1] == "9 of 9 identical, 0 near-ties, 0 bugs"
    assert [line.split()[-4:] for line in lines[1:4]] == [["3", "3", "0", "0"]] * 3
    assert lines[2].startswith("speculative, batch of 2")
    assert audit("--batch-size", "1").out.splitlines()[-1].startswith("3 of 3 identical")


def test_texts_drawn_by_noise(audit, monkeypatch):
    result = audit("--temperature", "0.9", "--batch-size", "2", "--json")
    assert result.json["settings"]["temperature"] == 0.9
    assert result.json["identical"] == result.json["compared"] == 9
    plant(monkeypatch)
    assert audit("--temperature", "0.9", "--batch-size", "1").code == 1


def test_a_bug_is_shown_and_is_exit_code_1(audit, monkeypatch):
    plant(monkeypatch)
    result = audit("--batch-size", "1", "--limit", "2")
    assert (result.code, result.err) == (1, "")
    assert result.out.splitlines()[-1] == "0 of 2 identical, 0 near-ties, 2 bugs"
    assert "bug  line 1: speculative leaves plain at output token 2 (margin" in result.out
    assert "… Hello there" in result.out
    assert "bug  line 3:" in result.out
    assert "\x1b" not in result.out


def test_a_near_tie_is_no_failure(audit, monkeypatch):
    plant(monkeypatch, near_tie=True)
    result = audit("--batch-size", "1")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "0 of 3 identical, 3 near-ties, 0 bugs"


def test_json(audit, monkeypatch, prompts):
    document = audit("--json").json
    assert document["schema"] == 1
    assert document["complete"]
    assert document["bugs"] == document["near_ties"] == document["differ"] == 0
    assert document["compared"] == document["identical"] == 3 * len(document["checks"]) == 9
    assert document["differences"] == []
    assert document["settings"]["prompts"] == prompts
    assert document["settings"]["controller"].startswith("auto")
    assert {"check": "speculative", "against": "plain"}.items() <= document["checks"][0].items()
    assert "torch" in document["versions"]
    plant(monkeypatch)
    result = audit("--json", "--batch-size", "1", "--limit", "1")
    assert result.code == 1
    (difference,) = result.json["differences"]
    assert (difference["kind"], difference["position"], difference["family"], difference["id"]) == (
        "bug", 2, "mine", "line 1",
    )  # fmt: skip
    assert difference["margin"] > difference["bound"] > 0
    assert difference["text"]["before"].startswith("Hello there")
    assert difference["outputs"][0][:2] == difference["outputs"][1][:2]


def test_an_interrupt_reports_what_was_compared(audit, monkeypatch):
    from forerun.lab import audit as lab

    own = lab.Comparison

    def compared(prompt, *rest):
        if prompt == 2:
            raise KeyboardInterrupt
        return own(prompt, *rest)

    monkeypatch.setattr(lab, "Comparison", compared)
    result = audit("--batch-size", "1")
    assert result.code == 130
    assert result.out.splitlines()[-1] == "2 of 2 identical, 0 near-ties, 0 bugs"
    assert "interrupted after 2 of 3 texts" in result.err
    result = audit("--batch-size", "1", "--json")
    assert (result.code, result.json["complete"], result.json["compared"]) == (130, False, 2)


def test_a_peer_that_cannot_run_is_named(audit, monkeypatch):
    def named(name, pythons):
        first = {"error": "ValueError: no model"} if "heuristic" in name else {"ready": True}
        code = (
            f"import sys; input(); print({json.dumps(first)!r}, flush=True)\nfor _ in sys.stdin: "
        )
        code += 'print(\'{"tokens": [[1]], "seconds": 0.1}\', flush=True)'
        return [Peer(name, (sys.executable, "-c", code))]

    monkeypatch.setattr("forerun.cli.audit.named", named)
    result = audit("--peer", "transformers", "--json")
    assert result.code == 0
    assert "transformers-assisted(heuristic,5) is left out: ValueError: no model" in result.err
    assert {c["check"] for c in result.json["checks"]} >= {"speculative", "transformers"}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--rule", "typical"], 2, "drift meter"),
        (["--rule", "typicl"], 2, "did you mean 'typical'"),
        (["--controller", "gammatun"], 2, "did you mean 'gammatune'"),
        (["--peer", "transformer"], 2, "did you mean 'transformers'"),
        (["--prompts", "builtin:storie"], 2, "did you mean 'stories'"),
        (["--prompts", "/no/such.jsonl"], 1, "No such file"),
        (["--split", "train"], 2, "split must be val or test"),
        (["--limit", "0"], 2, "limit must be"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens must be"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--temperature", "1", "--rule", "standard"], 2, "tosses coins"),
        (["--temperature", "1", "--peer", "transformers"], 2, "transformers is audited greedily"),
        (["--batch-size", "0"], 2, "batch size must be"),
        (["--target", "/no/model"], 1, "no model folder"),
    ],
)
def test_mistakes_are_one_line(audit, argv, code, words):
    result = audit(*argv)
    assert (result.code, result.out) == (code, "")
    assert words in result.error


def test_another_precision(audit):
    result = audit("--precision", "bf16", "--json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["texts"] == 3
    assert document["positions"] == 8 + 3 + 8
    assert 0 < document["moved"]["median"] < document["moved"]["largest"] < 1
    assert document["settings"]["precision"] == "bfloat16"
    shown = audit("--precision", "bf16").out
    assert "bfloat16 against float32" in shown
    assert f"{document['texts_differ']} of 3 texts differ" in shown


def test_int8_is_compared_on_openvino(audit):
    pytest.importorskip("openvino")
    result = audit("--precision", "int8", "--runtime", "openvino(threads=1)", "--json")
    document = json.loads(result.out)
    assert document["settings"]["precision"] == "int8"
    assert document["moved"]["median"] > 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--precision", "fp8"], "bf16 or int8"),
        (["--precision", "int8"], "add --runtime openvino"),
        (["--precision", "bf16", "--runtime", "auto"], "torch or openvino, got --runtime auto"),
    ],
)
def test_precisions_that_are_not_there(audit, argv, words):
    result = audit(*argv)
    assert result.code == 2
    assert words in result.err


def test_own_models_want_own_prompts(forerun, pair):
    result = forerun("audit", *pair.options)
    assert (result.code, "give --prompts FILE" in result.error) == (2, True)


def test_a_peer_wants_settings_it_knows(audit, tmp_path):
    path = tmp_path / "stops.jsonl"
    path.write_text('{"prompt": "Hello", "stop": "x"}\n')
    assert "with a peer" in audit("--prompts", str(path), "--peer", "transformers").error
    assert audit("--prompts", str(path)).code == 0


def test_the_shipped_pair(forerun):
    argv = ["--split", "val", "--limit", "2", "--max-new-tokens", "8", "--device", "cpu"]
    result = forerun("audit", *argv, "--prompts", "builtin:chat", "--batch-size", "2", "--json")
    assert result.code == 0
    assert result.json["compared"] == 6
    assert result.json["bugs"] == 0


def test_summary_of_nothing():
    assert summary([]) == "0 of 0 identical, 0 near-ties, 0 bugs"


# ---- the prompts of the lab's commands


def test_shipped_prompts_come_in_turns_and_capped():
    requests = find_prompts("builtin:all", "val", 2, 20)
    assert [f.family for f in requests] == [*families(), *families()]
    assert requests == find_prompts("builtin", "val", 2, 20)
    assert [f.id for f in requests[:6]] == [shipped(f, "val")[0].id for f in families()]
    own = {p.id: p for f in families() for p in shipped(f, "val")}
    for f in requests:
        expected = {"max_new_tokens": min(20, own[f.id].max_new_tokens)}
        if f.family == "stories":
            expected["repetition_penalty"] = PENALTY["stories"]
        assert f.settings == expected
    everything = find_prompts("builtin:chat", "test")
    assert [f.id for f in everything] == [p.id for p in shipped("chat", "test")]
    assert everything[0].settings["max_new_tokens"] == own["chat-val-000"].max_new_tokens


def test_shipped_prompts_without_penalties():
    requests = find_prompts("builtin", "val", penalised=False)
    known = {p.id: p for f in families() for p in shipped(f, "val")}
    assert {f.id for f in requests} == known.keys()
    for f in requests:
        assert f.settings == {"max_new_tokens": known[f.id].max_new_tokens}


def test_limit_is_per_family_and_of_a_file(prompts):
    from collections import Counter

    for limit in (1, 3):
        requests = find_prompts("builtin:all", "test", limit)
        assert Counter(f.family for f in requests) == dict.fromkeys(families(), limit)
        assert len(find_prompts("builtin:chat", "test", limit)) == limit
        assert len(find_prompts(prompts, "test", limit)) == limit


def test_seeds_of_prompts(tmp_path):
    path = tmp_path / "seeds.jsonl"
    path.write_text('"a"\n{"prompt": "b", "seed": 1}\n"c"\n')
    requests = seeded(find_prompts(str(path)), 5)
    assert [f.settings["seed"] for f in requests] == [5, 1, 7]


def test_prompts_of_a_file(pair, prompts):
    import forerun

    model = forerun.load(pair.target, pair.draft, device="cpu")
    rows = Reader.of(model).prepare(find_prompts(prompts, cap=8))
    assert [(r.family, r.id, r.sampling.max_new_tokens) for r in rows] == [
        ("mine", "line 1", 8), ("mine", "line 3", 3), ("mine", "line 4", 8),
    ]  # fmt: skip
    assert [r.sampling.repetition_penalty for r in rows] == [1.0, 1.0, 1.3]
    assert rows[0].ids == model.encode("Hello there")
    assert rows[2].ids == [5, 6, 7]
    [first] = Reader.of(model).prepare(find_prompts(prompts, limit=1))
    assert first.sampling.max_new_tokens == 128


def test_prompts_that_cannot_be_read(pair, tmp_path):
    import forerun

    model = forerun.load(pair.target, pair.draft, device="cpu")
    path = tmp_path / "bad.jsonl"
    for line, kind, words in (
        ("", PromptError, "holds no prompts"),
        ('"fine"\n""', PromptError, "line 2: the prompt is empty"),
        ('{"prompt": "x", "max_new_tokens": "3"}', SettingError, "max_new_tokens must be a whole"),
        ('{"prompt": "x", "temprature": 1}', UnknownNameError, "did you mean 'temperature'"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(kind, match=words):
            Reader.of(model).prepare(find_prompts(str(path), cap=4))
