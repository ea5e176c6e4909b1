"""`forerun costs` and `forerun replay`."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest

from forerun.cli.replay import warn_of_mixed_models
from forerun.controllers import CONTROLLERS
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay as replayed
from forerun.lab.traces.trace import SIGNALS, Trace
from made_traces import judged_greedily

pytest.importorskip("pyarrow")
COSTS = ["--costs", "c=10,slope=0.02"]


def made(prompts: int = 6, length: int = 20, depth: int = 8) -> Trace:
    """A trace of two families, drawn at random."""
    random = np.random.default_rng(0)
    shape = (prompts, length, depth)
    hit = random.random((prompts, length + depth)) < 0.7
    hit[:, length:] = False
    runs = np.lib.stride_tricks.sliding_window_view(hit, depth, axis=1)[:, :length]
    matches = runs.cumprod(2).sum(2)
    prob = (np.arange(depth) < matches[..., None]).astype(float)
    return Trace(
        families=("easy", "hard") * (prompts // 2),
        ids=tuple(map(str, range(prompts))),
        sizes=np.full(prompts, length),
        budgets=np.full(prompts, length),
        prompt_tokens=np.full(prompts, 3),
        tokens=np.ones((prompts, length), dtype=np.int64),
        draft_tokens=np.ones(shape, dtype=np.int64),
        matches=matches,
        ends=np.full((prompts, length), depth + 1),
        accept_prob=prob,
        signals={name: random.random(shape).astype(np.float32).astype(float) for name in SIGNALS},
        lengths=np.full((prompts, length), depth),
        stops=np.zeros((prompts, length), dtype=np.int64),
        judged=judged_greedily(runs),
        about={"target": "made"},
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "trace.parquet"
    made().write(path)
    return str(path)


@pytest.fixture
def replay(forerun, trace):
    return lambda *argv: forerun("replay", trace, *argv)


def test_table(replay):
    result = replay(*COSTS, "--controller", "fixed(3)", "--controller", "svip")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "6 prompts, 120 tokens; c = 10.00, batch 1, context 128"
    head = ["controller", "speed-up", "tokens/pass", "rounds", "drafted", "wasted"]
    assert lines[2].split() == head
    assert re.match(r"(fixed\(3\)|svip) +\d\.\d\d ±\d\.\d\d +\d\.\d\d +\d+", lines[3])
    assert "easy" in result.out
    assert re.search(r"^svip +\d\.\d\d +\d\.\d\d$", result.out, re.MULTILINE)
    assert "not exact" not in result.out
    assert max(map(len, lines)) <= 80


def test_drafts_beyond_the_depth_are_told(replay):
    result = replay(*COSTS, "--controller", "fixed(8)", "--controller", "fixed(9)")
    assert "not exact for fixed(9): drafts of more than the trace's 8 tokens" in result.out


def test_document(replay, trace):
    result = replay(*COSTS, "--controller", "fixed(3)", "--controller", "gammatune", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.json
    assert document["schema"] == 1
    assert document["cell"]["ratio"] == pytest.approx(10)
    assert document["trace"] == {"target": "made"}
    names = [one["controller"] for one in document["controllers"]]
    assert names == ["fixed(length=3)", "gammatune"]
    for name, one in zip(names, document["controllers"], strict=True):
        expected = replayed(Trace.read(trace), name, Cell.synthetic(10, 0.02))
        everything = one["families"]["all"]
        assert everything["rounds"] == expected.rounds.sum()
        assert everything["wasted"] == expected.wasted.sum()
        assert everything["speedup"]["n"] == 6
        rate = everything["tokens_per_second"]
        assert rate["mean"] == pytest.approx(120 / expected.seconds.sum())
        assert list(one["families"]) == ["all", "easy", "hard"]


def test_all_that_are_registered(replay):
    document = replay(*COSTS, "--json").json
    names = {one["controller"] for one in document["controllers"]}
    assert names == set(CONTROLLERS.names()) - {"bounded"}


def test_one_family(replay, trace):
    document = replay(*COSTS, "--controller", "fixed", "--family", "hard", "--json").json
    groups = document["controllers"][0]["families"]
    assert list(groups) == ["all", "hard"]
    assert groups["all"]["prompts"] == 3
    assert "by family" not in replay(*COSTS, "--controller", "fixed", "--family", "hard").out
    assert "did you mean 'hard'" in replay(*COSTS, "--family", "hart").error


def test_spreadsheet(replay, tmp_path):
    path = tmp_path / "out.csv"
    result = replay(*COSTS, "--controller", "fixed(3)", "--controller", "svip", "-o", str(path))
    assert (result.code, result.err) == (0, f"saved to {path}\n")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["controller"], row["family"]) for row in rows] == [
        (name, family) for name in ("fixed(length=3)", "svip") for family in ("all", "easy", "hard")
    ]
    for row in rows:
        low, mean, high = (float(row[f"speedup{end}"]) for end in ("_low", "", "_high"))
        assert low <= mean <= high
        assert int(row["wasted"]) == int(row["drafted"]) - int(row["accepted"])


def test_shares_of_the_bounds(replay, monkeypatch):
    from types import SimpleNamespace

    from forerun.lab.traces import replay_report

    # Fitting it takes long and is tested elsewhere.
    best = replayed(made(), "fixed(3)", Cell.synthetic(10, 0.02)).speedup
    monkeypatch.setattr(
        replay_report, "informed", lambda trace, cell: SimpleNamespace(speedup=best)
    )
    argv = (*COSTS, "--controller", "fixed(3)", "--controller", "fixed(0)", "--bounds")
    groups = [one["families"]["all"] for one in replay(*argv, "--json").json["controllers"]]
    assert groups[0]["share"]["informed"]["mean"] == pytest.approx(1.0)
    for group in groups:
        assert 0 < group["share"]["oracle"]["mean"] <= 1
    assert groups[1]["share"]["oracle"]["mean"] < groups[0]["share"]["oracle"]["mean"]
    shown = replay(*argv).out
    assert "oracle  informed" in shown
    assert re.search(r"^fixed\(3\) .* \d\d\.\d% +100\.0%$", shown, re.MULTILINE)
    tree = replay(*COSTS, "--controller", "auto(leaves=1)", "--bounds", "--json").json
    share = tree["controllers"][0]["families"]["all"]["share"]
    assert list(share) == ["oracle", "one_leaf", "all_leaves", "informed"]
    assert share["one_leaf"]["mean"] <= share["all_leaves"]["mean"]


def test_costs_of_a_file(replay, tmp_path):
    path = tmp_path / "costs.json"
    cells = [Cell.synthetic(c) for c in (2, 40)]
    CostTable((cells[0], Cell(cells[1].draft, cells[1].verify, batch=4))).write(path)
    for batch, ratio in ((1, 2), (8, 40)):
        argv = ("--costs", str(path), "--batch", str(batch), "--controller", "fixed", "--json")
        assert replay(*argv).json["cell"]["ratio"] == pytest.approx(ratio)


def test_whole_batches(replay, tmp_path):
    """Rows wait for the longest draft among them, which `fixed` and `svip` do not weigh."""
    argv = (*COSTS, "--controller", "fixed(3)", "--controller", "svip", "--batch", "3")
    document = replay(*argv, "--json").json
    assert document["batch"] == 3
    trace, cell = made(), Cell.synthetic(10, 0.02)
    for one in document["controllers"]:
        total, alone = one["families"]["all"], replayed(trace, one["controller"], cell)
        assert total["drafted"] == alone.drafted.sum()
        assert alone.seconds.sum() / 3 < total["seconds"] < alone.seconds.sum()
        assert total["plain_seconds"] == pytest.approx(cell.plain * trace.sizes.sum() / 3)
        rate = total["tokens_per_second"]["mean"]
        assert rate == pytest.approx(total["tokens"] / total["seconds"])
    assert "batch 3, context" in replay(*argv).out
    path = tmp_path / "costs.json"
    CostTable((cell,)).write(path)
    shown = replay("--costs", str(path), "--batch", "3", "--controller", "fixed")
    assert "no costs of a batch of 3: those of 1 are taken" in shown.err


RULED = ("--rules", "standard;ears(beta=0.2); spec-verification(tau=2)", "--controller", "fixed(3)")


def test_rules(replay, tmp_path):
    path = tmp_path / "out.csv"
    document = replay(*COSTS, *RULED, "--bounds", "-o", str(path), "--json").json
    groups = {one["rule"]: one["families"]["all"] for one in document["controllers"]}
    usual, ears, lenient = groups.values()
    assert list(groups)[1:] == ["ears(beta=0.2)", "spec-verification(tau=2)"]
    strict = replayed(made(), "fixed(3)", Cell.synthetic(10, 0.02))
    assert usual["rounds"] == ears["rounds"] == strict.rounds.sum()
    assert (usual["drift"], ears["drift"]) == (0, 0)
    assert lenient["rounds"] < usual["rounds"]  # it keeps the target's second choice
    assert lenient["drift"] > 0.1
    speeds = [bound["speedup"]["mean"] for bound in document["lenient_bound"]]
    assert speeds == sorted(speeds)
    assert [bound["drift"] <= bound["budget"] for bound in document["lenient_bound"]] == [True] * 4
    assert path.read_text().count("ears(beta=0.2)") == 3
    shown = replay(*COSTS, *RULED, "--bounds").out
    assert re.search(r"rule .*tokens/round +drift\n", shown)
    assert re.search(r"^fixed\(3\) +standard ", shown, re.MULTILINE)
    assert "length and leniency chosen together" in shown
    together = replay(*COSTS, *RULED, "--batch", "3", "--json").json["controllers"]
    assert [one["families"]["all"]["rounds"] for one in together] == [
        group["rounds"] for group in groups.values()
    ]


def test_rules_that_cannot_be_replayed(replay):
    for rule, message in (
        ("block", "judges drafts as a whole"),
        ("fly", "reads more of the two models than a trace holds"),
        ("easd(n=3,entropy=0)", "n of a rule in a replay must be 5"),
        ("nobody", "nobody"),
    ):
        assert message in replay(*COSTS, "--rules", rule).error


def test_interrupted(replay, monkeypatch, tmp_path):
    from forerun.lab.traces import replay_report as lab

    real, calls = lab.replay, []

    def once(*argv, **how):
        if calls:
            raise KeyboardInterrupt
        calls.append(argv)
        return real(*argv, **how)

    monkeypatch.setattr(lab, "replay", once)
    path = tmp_path / "out.csv"
    result = replay(*COSTS, "--controller", "fixed", "--controller", "svip", "-o", str(path))
    assert result.code == 130
    assert "interrupted after 1 of 2 replays" in result.err
    assert "fixed" in result.out
    assert path.read_text().count("fixed,") == 3
    result = replay(*COSTS, "--controller", "svip")
    assert (result.code, result.out) == (130, "")


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        ([], "--costs", 2),
        (["--costs", "c=0"], "c must be above 0", 2),
        (["--costs", "nowhere.json"], "nowhere.json", 2),
        ([*COSTS, "--controller", "gamatune"], "did you mean 'gammatune'", 2),
        ([*COSTS, "--controller", "fixed(-1)"], "length must be", 2),
        ([*COSTS, "-o", "/nowhere/out.csv"], "there is no folder", 2),
        ([*COSTS, "--batch", "0"], "batch must be", 2),
        ([*COSTS, "--clock", "noise", "--seed", "-1"], "seed must be", 2),
        ([*COSTS, "--batch", "2", "--bounds"], "leave out --batch", 2),
    ],
)
def test_mistakes(replay, argv, says, code):
    result = replay(*argv)
    assert (result.code, result.out) == (code, "")
    assert says in result.error


def test_not_a_trace(forerun, tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_text("no")
    result = forerun("replay", str(path), *COSTS)
    assert (result.code, "not a readable Parquet file" in result.error) == (2, True)
    assert forerun("replay", str(tmp_path / "none"), *COSTS).code == 1


def test_costs_made_up(forerun, tmp_path):
    path = tmp_path / "costs.json"
    argv = ("costs", "--ratio", "10", "--slope", "0.02", "--target-ms", "50", "-o", str(path))
    result = forerun(*argv)
    assert (result.code, result.err) == (0, f"saved to {path}\n")
    assert result.out.splitlines()[0] == "made up: c = 10.00"
    assert re.search(r"^drafted token +5\.00$", result.out, re.MULTILINE)
    assert CostTable.read(path).at() == Cell.synthetic(10, 0.02, seconds=0.05)
    assert forerun(*argv, "--json").json == json.loads(path.read_text())


@pytest.mark.usefixtures("quick_costs")
def test_costs_measured(forerun, pair, tmp_path):
    path = tmp_path / "costs.json"
    result = forerun(
        "costs", *pair.options, "--batch", "1,2", "--context", "16", "--widths", "3,5",
        "--repeats", "2", "-o", str(path),
    )  # fmt: skip
    assert (result.code, result.err) == (0, f"saved to {path}\n")
    assert re.search(r"^batch 1, context 16: c = \d", result.out, re.MULTILINE)
    assert re.search(r"^batch 2, context 16: c = \d", result.out, re.MULTILINE)
    number = r"[\d,]+\.\d\d"
    for what in ("draft forward", "target pass of 1 token", "target pass of 5 tokens"):
        row = rf"^{what} +{number} +{number} to {number}$"
        assert len(re.findall(row, result.out, re.MULTILINE)) == 2
    table = CostTable.read(path)
    assert [(cell.batch, len(cell.verify)) for cell in table.cells] == [(1, 3), (2, 3)]


@pytest.mark.usefixtures("quick_costs")
def test_costs_interrupted(forerun, pair, tmp_path, monkeypatch):
    from forerun.lab.traces import measuring

    real = measuring.measure

    def one(*argv):
        yield next(real(*argv))
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", one)
    path = tmp_path / "costs.json"
    argv = ("--batch", "1,2", "--context", "8", "--widths", "2", "--repeats", "1", "-o", str(path))
    assert forerun("costs", *pair.options, *argv).code == 130
    assert [cell.batch for cell in CostTable.read(path).cells] == [1]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--batch", "1,x"], "--batch must be whole numbers"),
        (["--context", "0"], "--context must be whole numbers"),
        (["--repeats", "0"], "--repeats must be"),
        (["--slope", "0.1"], "made with --ratio"),
        (["--ratio", "0"], "c must be above 0"),
        (["--ratio", "4", "--target", "x"], "leave --target"),
        (["--ratio", "4", "-o", "/nowhere/costs.json"], "there is no folder"),
    ],
)
def test_costs_mistakes(forerun, argv, says):
    result = forerun("costs", *argv)
    assert (result.code, result.out) == (2, "")
    assert says in result.error


@pytest.mark.parametrize("draft", [[], ["--draft", "lookup"]])
def test_costs_need_a_draft_model(forerun, pair, draft):
    result = forerun("costs", "--target", pair.target, *draft, "--context", "8")
    assert (result.code, result.out) == (2, "")
    assert "needs a draft model" in result.error


def test_costs_of_a_context_that_does_not_fit(forerun, pair):
    result = forerun("costs", *pair.options, "--context", "120")
    assert (result.code, "do not fit" in result.error) == (2, True)


def test_costs_of_other_models_are_told(capsys):
    trace = {"target": {"name": "a/b", "sha256": "1"}, "draft": {"name": "c/d", "sha256": "2"}}
    warn_of_mixed_models(trace, trace)
    warn_of_mixed_models({"target": "made"}, trace)
    assert capsys.readouterr().err == ""
    warn_of_mixed_models(trace, {**trace, "draft": {"name": "e/f", "sha256": "3"}})
    assert "the draft c/d and the costs are of e/f" in " ".join(capsys.readouterr().err.split())
