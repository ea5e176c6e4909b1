"""`forerun train-draft` on tiny targets: an encoder-decoder one, and a decoder alone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from forerun import Model
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
    done = train(kind, "--width", "4", "--json")
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
    assert "has none" in refused.error
    warned = forerun("generate", "--target", folders.draft, "Hi", "--draft", out)
    assert "was trained for another target" in warned.err


def test_an_interrupt_says_how_to_go_on(train, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("forerun.training.runs.stopping", lambda: nullcontext(lambda: True))
        first, second = train("block", "--width", "3"), train("block", "--width", "3", "--json")
    assert (first.code, second.code) == (130, 130)
    assert first.err.endswith("interrupted after step 1; the same command goes on from here\n")
    assert (second.json["complete"], second.json["steps"]) == (False, 2)
    assert train("block", "--width", "3", "--json").code == 0


def test_learning_helps_and_goes_on(train, tmp_path):
    """With more steps the same command trains longer; other settings are refused."""
    slow = ("block", "--lr", "0.003", "--width", "3", "--seed", "1")
    train(*slow, "--steps", "2", "--json")
    on = train(*slow, "--steps", "60", "--json")
    assert "going on at step 2" in on.err
    assert len(on.json["held_out"]["by_depth"]) == 3
    text = (tmp_path / "draft" / "log.jsonl").read_text()
    log = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in log] == list(range(1, 61))
    assert log[-1]["loss"] < log[2]["loss"] / 2
    other = train("shared", "--steps", "70")
    assert other.code == 2
    assert "begun with other settings" in other.error


@pytest.mark.parametrize("kind", ["shared", "block"])
def test_a_run_cut_in_two_is_the_run_in_one_piece(kind, folders, pairs, tmp_path):
    import torch

    import forerun
    from forerun.cli.shared.training_texts import read_pairs
    from forerun.training.grafts import GraftTrainer
    from forerun.training.settings import TrainingSettings

    model = forerun.load(folders.target, "none", device="cpu", dtype="float32")
    texts, settings = (
        read_pairs(Path(pairs), model),
        TrainingSettings(kind, width=3, steps=4, batch=3),
    )
    whole, first, rest = (GraftTrainer(model.target, settings) for _ in range(3))
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


def test_the_targets_own_texts_are_written_once(train, tmp_path, monkeypatch):
    counts, stream = [], Model.stream

    def counted(self, prompts, **how):
        counts.append(len(prompts))
        return stream(self, prompts, **how)

    monkeypatch.setattr(Model, "stream", counted)
    own = ("--own", "6", "--max-new-tokens", "6", "--json")
    done = train(*own)
    assert done.code == 0, done.err
    assert done.json["texts"] == 4
    assert counts == [6]
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "draft" / "own.jsonl.gz").rename(other / "own.jsonl.gz")
    assert train("block", *own, "-o", str(other)).code == 0
    assert counts == [6]
    assert train(*own, "--max-new-tokens", "5", "--steps", "7").code == 0
    assert counts == [6, 6]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--pairs", "missing.tsv"), "missing.tsv"),
        (("oracle",), "kind must be 'shared' or 'block' or 'kangaroo' or"),
        (("--data", "builtin"), "learns from pairs; leave --data out"),
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


# Kangaroo's adapter


@pytest.fixture
def adapt(forerun, folders, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 2))

    def run(*argv: str):
        given = {"--target": folders.decoder, "--data": str(path), "--batch": "8", "--steps": "6",
                 "--layers": "1", "--device": "cpu", "-o": str(tmp_path / "adapter")}  # fmt: skip
        rest = [word for key, value in given.items() if key not in argv for word in (key, value)]
        kind = () if argv[:1] == ("medusa",) else ("kangaroo",)
        return forerun("train-draft", *kind, *rest, *argv)

    return run


def test_a_trained_adapter_drafts(adapt, forerun, folders, tmp_path):
    done = adapt("--json")
    assert done.code == 0, done.err
    assert (done.json["kind"], done.json["layers"], done.json["steps"]) == ("kangaroo", 1, 6)
    assert 0 <= done.json["held_out"]["top1"] <= 1
    out = str(tmp_path / "adapter")
    text = ("generate", "--target", folders.decoder, TEXTS[0], "--max-new-tokens", "12", "--json")
    written = forerun(*text, "--draft", out, "--compare", "--controller", "fixed(9)")
    assert written.code == 0, written.err
    assert written.json["compare"]["identical"]
    named = forerun(*text, "--draft", f"kangaroo(path='{out}',threshold=0)")
    assert named.json["completions"][0]["tokens"] == written.json["completions"][0]["tokens"]
    elsewhere = forerun(*text, "--draft", "kangaroo")
    assert elsewhere.code == 2
    assert "make one with forerun train-draft kangaroo" in elsewhere.err
    missing = forerun(*text, "--draft", "kangaroo(path='nowhere')")
    assert "draft.json is missing" in missing.err


def test_an_adapter_learns_and_goes_on(adapt, tmp_path):
    adapt("--lr", "0.01", "--steps", "2")
    on = adapt("--lr", "0.01", "--steps", "80", "--json")
    assert "going on at step 2" in on.err
    log = [json.loads(s) for s in (tmp_path / "adapter" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 81))
    assert [line["step"] for line in log if "held_out" in line] == [1, 2, *range(10, 81, 10)]
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    again = adapt("--lr", "0.01", "--steps", "80", "--json")
    assert again.json["held_out"] == on.json["held_out"]
    assert "begun with other settings" in adapt("--layers", "2", "--steps", "90").err


def test_what_is_learnt_is_what_is_drafted(folders):
    """The logits of training are those of the cached pass."""
    import torch

    import forerun
    from forerun.drafters.kangaroo import KangarooDrafter
    from forerun.runtime.base import Rows
    from forerun.runtime.exits import LayersExecutor
    from forerun.training.fit import Document
    from forerun.training.heads import AdapterTrainer
    from forerun.training.settings import TrainingSettings

    model = forerun.load(folders.decoder, "none", device="cpu", dtype="float32")
    trainer = AdapterTrainer(model.target, TrainingSettings("kangaroo", (2,), batch=2))
    texts = [Document([5, 9, 7, 11, 6], 1), Document([8, 4, 30])]
    for _ in trainer.train(texts):
        if trainer.step == 3:
            break
    student_logits, taught = trainer._both(texts)
    assert student_logits.shape == taught.shape == (3 + 2, model.target.vocab_size)
    assert not any(p.requires_grad for p in model.target.executor.module().parameters())
    states = trainer._states
    assert len(states._held) == 2  # what the target said is kept
    states._held.clear()
    states._room = 0
    for kept, anew in zip((student_logits, taught), trainer._both(texts), strict=True):
        torch.testing.assert_close(kept, anew, atol=1e-5, rtol=1e-5)
    assert not states._held
    executor = LayersExecutor(model.target.executor.module(), trainer.adapter)
    drafter = KangarooDrafter(Rows(executor), 0.6, 6)
    contexts = [texts[0][0][:3], texts[1][0][:1]]
    drafter.rows.read(contexts)
    with torch.inference_mode():
        logits = drafter.step(contexts, None).logits
    torch.testing.assert_close(logits, student_logits[[1, 3]].detach(), atol=1e-4, rtol=1e-4)
    plain = model.target.executor.module()(torch.tensor([texts[0][0]])).logits[0, 1:4]
    torch.testing.assert_close(taught[:3], plain.log_softmax(-1).detach(), atol=1e-4, rtol=1e-4)


def test_an_adapter_of_a_target_in_16_bits_learns_in_float32(adapt, folders, tmp_path):
    """As a GGUF file's is, whose weights are widened; it drafts in the target's own type."""
    import torch

    import forerun

    done = adapt("--dtype", "bfloat16", "--lr", "0.00005", "--steps", "40", "--json")
    assert done.code == 0, done.err
    saved = torch.load(tmp_path / "adapter" / "training.pt", weights_only=True)["own"]
    assert all(own.dtype == torch.float32 for own in saved.values())
    assert any(bool((own != own.bfloat16()).any()) for own in saved.values())
    model = forerun.load(folders.decoder, tmp_path / "adapter", device="cpu", dtype="bfloat16")
    assert model.target.executor.module().dtype == torch.bfloat16
    assert model.generate(TEXTS[0], max_new_tokens=9, controller="fixed(3)").stats.drafted


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--layers", "3"), "layers must be between 1 and 2 for kangaroo"),
        (("--layers", "0"), "layers must be a whole number"),
        (("--data", "missing.txt"), "missing.txt"),
        (("--pairs", "pairs.tsv"), "learns from texts; give --data"),
        (("--tokens", "0"), "tokens"),
    ],
)
def test_adapters_that_cannot_be(adapt, argv, why):
    refused = adapt(*argv)
    assert refused.code in (1, 2)
    assert why in refused.err


def test_an_adapter_needs_layers_to_call(adapt, folders):
    refused = adapt("--target", folders.target)
    assert refused.code == 2
    assert "decoder-only" in refused.err


# Medusa's heads


def test_trained_heads_draft(adapt, forerun, folders, tmp_path):
    heads = ("medusa", "--width", "3", "--vocab", "20")
    first = adapt(*heads, "--steps", "2", "--json")
    assert first.code == 0, first.err
    done = adapt(*heads, "--steps", "40", "--lr", "0.001", "--json")
    assert done.code == 0, done.err
    assert "going on at step 2" in done.err
    assert (done.json["kind"], done.json["layers"], done.json["width"]) == ("medusa", 1, 3)
    assert len(done.json["held_out"]["by_depth"]) == 3
    log = [json.loads(s) for s in (tmp_path / "adapter" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 41))
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    out = str(tmp_path / "adapter")
    text = ("generate", "--target", folders.decoder, TEXTS[0], "--max-new-tokens", "12", "--json")
    written = forerun(*text, "--draft", out, "--compare", "--controller", "fixed(9)")
    assert written.code == 0, written.err
    assert written.json["compare"]["identical"]
    named = forerun(*text, "--draft", f"medusa(path='{out}',heads=2)")
    assert named.json["completions"][0]["tokens"] == written.json["completions"][0]["tokens"]
    assert "make one with forerun train-draft medusa" in forerun(*text, "--draft", "medusa").err
    other = forerun(*text, "--draft", f"kangaroo(path='{out}')")
    assert "for the drafter 'medusa', not 'kangaroo'" in other.err
    compiled = forerun(*text, "--draft", f"medusa(path='{out}')", "--runtime", "openvino")
    assert compiled.code == 2
    assert "use the runtime torch" in compiled.err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--width", "0"), "width must be a whole number of at least 1"),
        (("--layers", "0"), "layers must be a whole number"),
        (("--vocab", "100000"), "vocab must be at most the model's vocabulary"),
        (("--vocab", "-1"), "vocab must be a whole number of at least 0"),
        (("--pairs", "pairs.tsv"), "learns from texts; give --data"),
    ],
)
def test_heads_that_cannot_be(adapt, argv, why):
    refused = adapt("medusa", *argv)
    assert refused.code == 2
    assert why in refused.err


def test_heads_need_a_target_without_encoder(adapt, folders):
    refused = adapt("medusa", "--target", folders.target)
    assert refused.code in (1, 2)
    assert "decoder-only" in refused.err
