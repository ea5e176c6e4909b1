"""`forerun sweep specbound` on a tiny model."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest

from forerun.cli.shared.guard import guarded
from forerun.model import load
from forerun.runtime.layers import LayerAccess
from forerun.settings import Settings

sweep = import_module("forerun.cli.sweep")
FAST = ("--budget", "6", "--max-new-tokens", "6", "--width", "3", "--confirm", "1")
LINES = [{"prompt": "Goats eat"}, {"prompt": "The hut", "max_new_tokens": 4}, {"tokens": [5, 6]}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    return str(path)


@pytest.fixture
def run(capsys, pair, prompts):
    """The command, with a tiny target and three prompts unless told otherwise."""

    def run(*argv, target=True):
        own = ("--target", pair.target, "--device", "cpu", *FAST) if target else ()
        capsys.readouterr()
        args = ["specbound", *own, *argv]
        code = guarded(lambda: sweep.app(args=args, standalone_mode=False))
        return code, *capsys.readouterr()

    return run


def test_document_and_settings_file(run, prompts, pair, tmp_path):
    path = tmp_path / "settings.json"
    code, out, err = run("--prompts", prompts, "--json", "-o", str(path))
    assert (code, err) == (0, "")
    made, kept = json.loads(out), json.loads(path.read_text(encoding="utf-8"))
    assert list(kept) == ["schema", "controller", "rule", "draft", "about"]
    assert (kept["schema"], kept["rule"]) == (1, None)
    assert kept["draft"] == made["draft"] == made["confirmed"][0]["draft"]
    assert kept["about"] == made["about"]
    about = kept["about"]
    assert (about["prompts_used"], about["temperature"], about["seed"]) == (3, 0.0, 0)
    assert kept["controller"] == f"fixed({about['settings']['width'] + 1})"
    assert set(made["sensitivity"]) == {"threshold", "anneal", "depth", "width", "layers", "bonus"}
    assert sum(made["time"].values()) == pytest.approx(1.0, abs=1e-3)
    assert made["untuned"] in [c["draft"] for c in made["confirmed"]]
    for c in made["confirmed"]:
        assert c["same"] == 3
        assert c["speedup"]["low"] <= c["speedup"]["mean"] <= c["speedup"]["high"]
    predicted = [s["predicted"] for s in made["top"]]
    assert predicted == sorted(predicted, reverse=True)

    how = {"max_new_tokens": 6, "plain": False, "controller": kept["controller"]}
    model = load(pair.target, kept["draft"], device="cpu")
    tuned = model.generate("Goats eat", **how)
    assert tuned.tokens == model.generate("Goats eat", **{**how, "plain": True}).tokens


def test_kept_beside_the_heads(run, prompts, pair, tmp_path):
    from test_heads import save_heads, some_heads

    access = LayerAccess(load(pair.target, "none").target.executor.module())
    heads = save_heads(some_heads(access), tmp_path / "heads")
    code, _, err = run("--prompts", prompts, "--exits", str(heads), "--keep", "--json")
    assert (code, err) == (0, "")
    document = json.loads((heads / "draft.json").read_text())
    assert load(pair.target, f"specbound(exits='{heads}')").drafter.layers == tuple(
        map(int, document["tuned"]["layers"].split(","))
    )
    saved = tmp_path / "elsewhere" / "settings.json"
    saved.parent.mkdir()
    code, *_ = run("--prompts", prompts, "--exits", str(heads), "-o", str(saved), "--json")
    assert code == 0
    assert Settings.read(saved).draft.endswith(f"exits='{heads}')")
    code, _, err = run("--prompts", prompts, "--keep")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: --keep writes beside exit heads; name their folder with --exits",
    )


def test_summary(run, prompts):
    code, out, err = run("--prompts", prompts, "--limit", "2", "--temperature", "1")
    assert (code, err) == (0, "")
    assert out.startswith("2 texts, ")
    assert "predicted" in out
    assert "(untuned)" in out
    assert "where time goes: layers " in out
    last = out.strip().splitlines()[-1]
    assert last.startswith('--draft "specbound(threshold=')
    assert "exits=''" in last
    assert '--controller "fixed(' in last


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "no prompts; give `prompts` FILE"),
        (("--prompts", "builtin:poems"), "family of shipped prompts 'poems'"),
        (("--prompts", "there.jsonl"), "No such file"),
        (("--prompts", "builtin", "--budget", "0"), "budget must be ≥ 1"),
        (("--prompts", "builtin", "--seed", "-1"), "seed must be ≥ 0"),
        (("--prompts", "builtin", "-o", "."), "-o . is a folder"),
        (("--prompts", "FILE", "--exits", "there"), "'there' holds no draft"),
    ],
)
def test_mistakes_are_one_line(run, prompts, argv, words):
    code, out, err = run(*(prompts if word == "FILE" else word for word in argv))
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_without_optuna_the_extra_is_named(run, prompts, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run("--prompts", prompts)
    assert code == 1
    assert "pip install 'forerun[lab]'" in err


def test_interrupted_it_keeps_the_best_so_far(run, prompts, tmp_path, monkeypatch):
    def interrupt(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.lab.exits.sweep.Sweep.confirm", interrupt)
    path = tmp_path / "settings.json"
    code, out, err = run("--prompts", prompts, "-o", str(path))
    assert (code, out) == (130, "")
    assert "interrupted; the best settings so far are in" in err
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["about"]["complete"] is False
    assert kept["draft"].startswith("specbound(")


def test_shipped_prompts_are_the_validation_ones(run, monkeypatch):
    asked = []

    def interrupt(*args):
        asked.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.sweep.find_prompts", interrupt)
    for argv in ((), ("--prompts", "file"), ("--prompts", "file", "--limit", "7")):
        assert run(*argv, target=False)[0] == 130
    assert asked == [
        ("builtin:all", "val", 5, 48), ("file", "val", 30, 48), ("file", "val", 7, 48),
    ]  # fmt: skip
