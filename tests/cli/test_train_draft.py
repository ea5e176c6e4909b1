"""`forerun train-draft` on a tiny encoder-decoder target."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from sourced import TEXTS, Folders, save_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return save_folders(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(f"{a}\t{b}" for a, b in pairwise(TEXTS)))
    return str(path)


@pytest.fixture
def train(forerun, folders, pairs, tmp_path):
    def run(*argv: str):
        given = {"--target": folders.target, "--pairs": pairs, "--batch": "4", "--steps": "6",
                 "--device": "cpu", "-o": str(tmp_path / "draft")}  # fmt: skip
        rest = [word for key, value in given.items() if key not in argv for word in (key, value)]
        return forerun("train-draft", *rest, *argv)

    return run


@pytest.mark.parametrize("kind", ["shared", "block"])
def test_a_trained_draft_drafts(train, forerun, folders, tmp_path, kind):
    done = train("--kind", kind, "--width", "4", "--json")
    assert done.code == 0, done.err
    assert done.json["complete"]
    assert done.json["steps"] == 6
    assert 0 <= done.json["held_out"]["top1"] <= 1
    out = str(tmp_path / "draft")
    text = ("generate", "--target", folders.target, TEXTS[0], "--max-new-tokens", "8", "--json")
    written = forerun(*text, "--draft", out, "--compare", "--controller", "fixed(3)")
    assert written.code == 0, written.err
    assert written.json["compare"]["identical"]
    named = forerun(*text, "--draft", f"{kind}(path='{out}')")
    assert named.json["completions"][0]["tokens"] == written.json["completions"][0]["tokens"]
    other = "block" if kind == "shared" else "shared"
    assert f"for the drafter '{kind}'" in forerun(*text, "--draft", f"{other}(path='{out}')").error
    refused = forerun("generate", "--target", folders.decoder, "Hi", "--draft", out)
    assert refused.code == 2
    assert "this target has none" in refused.error
    warned = forerun("generate", "--target", folders.draft, "Hi", "--draft", out)
    assert "was trained for another target" in warned.err


def test_learning_helps_and_goes_on(train, tmp_path):
    """With more steps the same command trains longer; other settings are refused."""
    slow = ("--lr", "0.003", "--kind", "block", "--width", "3", "--seed", "1")
    train(*slow, "--steps", "2", "--json")
    on = train(*slow, "--steps", "60", "--json")
    assert "going on at step 2" in on.err
    assert len(on.json["held_out"]["by_depth"]) == 3
    text = (tmp_path / "draft" / "log.jsonl").read_text()
    log = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in log] == list(range(1, 61))
    assert log[-1]["loss"] < log[2]["loss"] / 2
    other = train("--kind", "shared", "--steps", "70")
    assert other.code == 2
    assert "begun with other settings" in other.error


@pytest.mark.parametrize("kind", ["shared", "block"])
def test_a_run_cut_in_two_is_the_run_in_one_piece(kind, folders, pairs, tmp_path):
    import torch

    import forerun
    from forerun.cli.shared.pair_texts import read_pairs
    from forerun.training.drafts import Settings, Trainer

    model = forerun.load(folders.target, "none", device="cpu", dtype="float32")
    texts, settings = read_pairs(Path(pairs), model), Settings(kind, width=3, steps=4, batch=3)
    whole, first, rest = (Trainer(model.target, settings) for _ in range(3))
    assert len(list(whole.train(texts))) == 4
    for record in first.train(texts):
        if record["step"] == 2:
            break
    first.save(tmp_path / "training.pt")
    rest.load(tmp_path / "training.pt")
    assert [record["step"] for record in rest.train(texts)] == [3, 4]
    for name, value in whole.own.items():
        torch.testing.assert_close(rest.own[name], value, rtol=0, atol=0)
    assert not any(p.requires_grad for p in model.target.executor.module().parameters())


def test_the_targets_own_texts(train):
    done = train("--own", "8", "--max-new-tokens", "6", "--json")
    assert done.code == 0, done.err
    assert done.json["texts"] == 7


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--pairs", "missing.tsv"), "missing.tsv"),
        (("--kind", "medusa"), "kind must be shared or block"),
        (("--layers", "3"), "between 1 and the target's 2"),
        (("--steps", "0"), "steps"),
    ],
)
def test_what_cannot_be_is_refused(train, argv, why):
    refused = train(*argv)
    assert refused.code in (1, 2)
    assert why in refused.error


def test_lines_that_are_no_pairs_are_named(train, tmp_path):
    path = tmp_path / "odd.tsv"
    path.write_text("one\ttwo\nthree\n")
    assert (
        "line 2: expected SOURCE, a tab, TARGET; got 'three'" in train("--pairs", str(path)).error
    )
