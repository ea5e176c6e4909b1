"""`forerun tune`, and settings on the command line and in `forerun.load`."""

from __future__ import annotations

import json
import re

import pytest

import forerun as package
from forerun.controllers import CONTROLLERS
from forerun.lab.traces import tune as lab
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.tune import speed
from forerun.model import DEFAULT_CONTROLLER
from forerun.settings import Settings
from made_traces import periodic, random_trace


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.parquet"
    periodic(4).write(path)
    return str(path)


@pytest.fixture
def tune(forerun, trace):
    """`forerun tune` on a trace where four tokens are best."""

    def run(*argv: str, costs: str = "c=10,slope=0.02"):
        return forerun("tune", trace, "--costs", costs, "--budget", "4", *argv)

    return run


def test_summary(tune):
    result = tune("--controller", "fixed", "--controller", "svip")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("searched on 4 prompts, judged on 4 others (every other prompt of")
    assert re.search(r"^fixed( +\d\.\d\d \d\.\d\d–\d\.\d\d){4}$", result.out, re.MULTILINE)
    assert re.search(r"^a( +\d\.\d\d \d\.\d\d–\d\.\d\d){4}$", result.out, re.MULTILINE)
    assert "best fixed length: fixed(length=4)" in result.out
    assert "\x1b" not in result.out
    spec = re.fullmatch(r'--controller "(.*)"', lines[-1]).group(1)
    assert CONTROLLERS.make(spec)


def test_json(tune):
    document = tune("--controller", "fixed", "--json").json
    cell = Cell.synthetic(10, slope=0.02)
    (one,) = document["controllers"]
    assert (one["name"], one["best"], one["complete"]) == ("fixed", "fixed(length=4)", True)
    ours = speed(periodic(4), "fixed(4)", cell)
    assert one["test"]["tuned"]["mean"] == pytest.approx(ours)
    assert one["test"]["tuned"]["n"] == 4
    default = speed(periodic(4), "fixed", cell)
    assert one["families"]["b"]["gain"]["mean"] == pytest.approx(ours / default)
    assert one["test"]["over_fixed"]["mean"] == pytest.approx(1)
    assert document["best_fixed"]["overall"]["mean"] == pytest.approx(ours)
    assert document["split"] == {
        "how": "every other prompt of each family", "searched": 4, "judged": 4,
    }  # fmt: skip
    assert document["settings"]["controller"] == "fixed(length=4)"
    assert document["recommended"] == {"spec": "fixed(length=4)", "reason": None}
    assert tune("--controller", "fixed", "--json").json == document


def test_the_settings_it_saves_run(tune, generate, tmp_path):
    path = str(tmp_path / "settings.json")
    result = tune("--controller", "fixed", "-o", path)
    assert result.err.strip() == f"settings: saved to {path}"
    saved = Settings.read(path)
    assert (saved.controller, saved.rule, saved.draft) == ("fixed(length=4)", None, "someone/draft")
    assert saved.about["trace"] == "trace.parquet"
    assert str(tmp_path) not in saved.to_json()
    done = generate("Hello", "--max-new-tokens", "6", "--settings", path, "--json")
    assert done.json["settings"]["controller"] == "fixed(length=4)"
    assert done.json["settings"]["rule"] == "gumbel"
    assert f"{path}: fixed(length=4), gumbel, draft " in done.err


def test_options_win_over_settings(generate, tmp_path):
    path = tmp_path / "settings.json"
    Settings(controller="fixed(length=2)", rule="exact").write(path)
    given = ("Hello", "--max-new-tokens", "4", "--json", "--settings", str(path))
    used = generate(*given, "--controller", "svip").json["settings"]
    assert (used["controller"], used["rule"]) == ("svip", "exact")
    # Also when what is given is the default.
    used = generate(*given, "--rule", "standard").json["settings"]
    assert (used["controller"], used["rule"]) == ("fixed(length=2)", "standard")


def test_the_draft_of_settings_is_used(forerun, pair, tmp_path):
    path = tmp_path / "settings.json"
    Settings(draft="lookup(n=2)").write(path)
    given = ("--target", pair.target, "--device", "cpu", "--max-new-tokens", "4", "--json")
    used = forerun("generate", "Hello", *given, "--settings", str(path)).json["settings"]
    assert used["draft"] == "lookup(n=2)"
    used = forerun("generate", "Hello", *given, "--settings", str(path), "--draft", "none")
    assert used.json["settings"]["draft"] == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "controler": "svip"}', "did you mean 'controller'?"),
        ('{"schema": 1, "controller": "fixed(-1)"}', "length must be"),
        ("{", "is not a settings file"),
    ],
)
def test_mistakes_in_settings_are_told(generate, tmp_path, text, message):
    path = tmp_path / "settings.json"
    path.write_text(text)
    result = generate("Hello", "--settings", str(path))
    assert (result.code, result.out) == (2, "")
    assert message in result.error
    missing = generate("Hello", "--settings", str(tmp_path / "none.json"))
    assert missing.code == 1
    assert "none.json" in missing.error


def test_load_takes_settings(pair, tmp_path):
    path = tmp_path / "settings.json"
    Settings(controller="fixed(length=2)", draft=pair.draft).write(path)
    model = package.load(pair.target, settings=path, device="cpu")
    drafted = [r.drafted for r in model.generate("Hello", max_new_tokens=9).rounds]
    assert set(drafted[:2]) == {2}
    (first, *_) = model.generate("Hello", max_new_tokens=9, controller="fixed(3)").rounds
    assert first.drafted == 3
    same = package.load(pair.target, settings=Settings.read(path), device="cpu")
    assert [r.drafted for r in same.generate("Hello", max_new_tokens=9).rounds] == drafted


def test_what_is_no_better_than_the_defaults_is_not_recommended(tune, tmp_path, monkeypatch):
    path = tmp_path / "settings.json"

    def search(spec, trace, cell, **rest):
        best = "svip(threshold=0.9)" if spec.name == "svip" else "fixed"
        return lab.SearchResult(
            spec.name, spec.name, best, 1.0, 2.0 if spec.name == "svip" else 1.5
        )

    monkeypatch.setattr(lab, "search", search)
    monkeypatch.setattr(lab, "geometric", lambda values, seed=0: {
        "mean": 1.01, "low": 1.0, "high": 1.05, "n": 4,
    })  # fmt: skip
    result = tune("--controller", "svip", "-o", str(path))
    assert (
        "svip(threshold=0.9) is no better than svip on the prompts judged (tuned/default 1.01 "
        '1.00–1.05); recommended is\n\n--controller "svip"\n'
    ) in result.out
    assert Settings.read(path).controller == "svip"
    assert Settings.read(path).about["found"] == "svip(threshold=0.9)"
    # Of all controllers, the one that needs no setting.
    free = tune("--json", "-o", str(path)).json["recommended"]
    assert free["spec"] == Settings.read(path).controller == lab.DEFAULT == DEFAULT_CONTROLLER
    assert "svip is no better than auto, the default" in free["reason"]


def test_the_defaults_themselves_are_said(tune):
    result = tune("--controller", "fixed(4)", "--json").json["recommended"]
    assert result["spec"] == "fixed(length=4)"
    assert result["reason"] == "no setting of fixed was faster than its defaults"


def test_another_trace_judges(tune, trace, tmp_path):
    other = str(tmp_path / "other.parquet")
    random_trace(prompts=6).write(other)
    document = tune("--controller", "fixed", "--test", other, "--json").json
    assert document["split"] == {"how": "another trace", "searched": 8, "judged": 6}
    assert document["controllers"][0]["test"]["tuned"]["mean"] == pytest.approx(
        speed(random_trace(prompts=6), "fixed(4)", Cell.synthetic(10, slope=0.02))
    )
    result = tune("--controller", "fixed", "--test", trace)
    assert result.code == 2
    assert "8 prompts are in both traces" in result.error


def test_a_file_of_costs_has_batch_sizes(tune, tmp_path):
    cells = [
        Cell(0.1, ((1, 1.0), (2, 1.0 + slope)), batch=batch, context=context)
        for batch, slope in ((1, 0.0), (4, 0.1), (16, 3.0))
        for context in (64, 512)
    ]
    path, out = str(tmp_path / "costs.json"), str(tmp_path / "vllm.json")
    CostTable(tuple(cells)).write(path)
    given = ("--controller", "fixed", "--json", "--export", f"vllm:{out}")
    report = tune(*given, costs=path).json
    assert (report["costs"]["batch"], report["costs"]["context"]) == (1, 64)
    document = json.loads((tmp_path / "vllm.json").read_text())
    assert document["speculative_config"]["num_speculative_tokens_per_batch_size"] == [
        [1, 4, 4],
        [5, 16, 0],
    ]
    assert report["exports"]["vllm"]["like"] == [f"fixed(length={n})" for n in (4, 4, 0)]
    result = tune("--controller", "fixed", "--json", "--batch", "9", "--context", "300", costs=path)
    assert (result.json["costs"]["batch"], result.json["costs"]["context"]) == (16, 512)
    assert result.json["settings"]["controller"] == "fixed(length=0)"


def test_exports_say_what_they_cannot(tune, tmp_path):
    files = {e: str(tmp_path / f"{e}.txt") for e in ("vllm", "transformers", "llama.cpp")}
    options = [word for e, file in files.items() for word in ("--export", f"{e}:{file}")]
    result = tune("--controller", "fixed", *options)
    assert result.code == 0
    lines = result.err.strip().splitlines()
    assert len(lines) == 3
    for line, (engine, file) in zip(lines, files.items(), strict=True):
        assert line.startswith(f"{engine}: saved to {file}; cannot express: ")


def test_an_interrupt_keeps_and_saves_the_best_so_far(tune, tmp_path, monkeypatch):
    real, calls = lab.speed, []

    def impatient(*args):
        calls.append(args)
        if len(calls) > 13 + 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(lab, "speed", impatient)
    path = tmp_path / "settings.json"
    result = tune("--controller", "fixed", "--controller", "svip", "-o", str(path), "--json")
    assert result.code == 130
    assert "interrupted; this is the best so far" in result.err
    assert not result.json["complete"]
    assert [one["complete"] for one in result.json["controllers"]] == [True, False]
    assert Settings.read(path).controller == result.json["settings"]["controller"]
    assert Settings.read(path).about["complete"] is False
    path.unlink()
    calls[:] = [None] * 14  # nothing but the fixed lengths
    assert tune("--controller", "svip", "-o", str(path)).code == 130
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--controller", "gamatune"], "did you mean 'gammatune'?"),
        (["--controller", "gammatune(eta=3)"], "eta must be"),
        (["--budget", "0"], "budget must be"),
        (["--seed", "-1"], "seed must be"),
        (["--batch", "0"], "batch must be"),
        (["--export", "vllm"], "--export wants ENGINE:FILE"),
        (["--export", "vlm:x.json"], "did you mean 'vllm'?"),
        (["-o", "/no/such/folder/s.json"], "there is no folder"),
        (["--export", "vllm:/no/such/folder/s.json"], "--export vllm /no/such/folder/s.json"),
        (["--costs", "c=0"], "c must be"),
        (["--costs", "slop=1"], "did you mean 'slope'?"),
    ],
)
def test_mistakes_are_told(tune, argv, message):
    result = tune(*argv)
    assert (result.code, result.out) == (2, "")
    assert message in result.error


def test_arguments_are_flags_on_the_command_line(forerun, tmp_path):
    path = str(tmp_path / "one.parquet")
    periodic(1).take([0]).write(path)
    result = forerun("tune", path, "--costs", "c=10")
    assert result.error == "error: one prompt cannot be halved; name other prompts as --test"


def test_files_that_are_none_are_told(tune, forerun, tmp_path):
    assert "none.json" in tune(costs=str(tmp_path / "none.json")).error
    result = forerun("tune", str(tmp_path / "none.parquet"), "--costs", "c=10")
    assert result.code == 1
    assert "none.parquet" in result.error
    assert "--costs" in forerun("tune", str(tmp_path / "none.parquet")).error
