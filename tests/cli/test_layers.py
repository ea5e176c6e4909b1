"""`forerun layers`: the last layer is the model, and the picture is the table."""

import json

import torch

from forerun.cli.layers import share_sure
from forerun.lab.exits.exit_replay import view_layers


def test_shows_every_layer_and_draws(forerun, pair, tmp_path):
    picture = tmp_path / "layers.svg"
    common = ("layers", "Once", "--target", pair.target, "--device", "cpu", "--max-new-tokens", "3")
    done = forerun(*common, "-o", str(picture))
    assert len(done.out.splitlines()) == 1 + _layers(pair)
    assert picture.read_text().startswith("<svg")
    shown = forerun(*common, "--json").json["layers"]
    assert [len(layer) for layer in shown] == [3] * _layers(pair)
    written = forerun(
        "generate", *common[1:], "--draft", "none", "--controller", "fixed(0)", "--json"
    )
    assert [cell["id"] for cell in shown[-1]] == written.json["completions"][0]["tokens"]


def test_the_last_layer_is_the_model(pair):
    from transformers import AutoModelForCausalLM

    model, text = AutoModelForCausalLM.from_pretrained(pair.target), [5, 9, 3, 77, 12]
    tokens, probs = view_layers(model, text, 2)
    best = model(torch.tensor([text[:-1]])).logits[0, -2:].softmax(-1).max(-1)
    assert tokens[-1] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor(probs[-1]), best.values, atol=1e-5, rtol=0)


def test_sure_and_right():
    first, last = (
        [{"id": i, "probability": p} for i, p in zip(ids, probs, strict=True)]
        for ids, probs in (([1, 2, 3, 4], [0.9, 0.8, 0.2, 0.7]), ([1, 5, 3, 6], [1.0] * 4))
    )
    assert share_sure(first, last, 0.7) == (0.75, 1 / 3)
    assert share_sure(last, last, 0.7) == (1.0, 1.0)


def test_bad_settings_are_named(forerun, pair):
    for flags in (
        ("--sure", "0"),
        ("--sure", "2"),
        ("-o", "layers.png"),
        ("--max-new-tokens", "0"),
    ):
        assert forerun("layers", "x", "--target", pair.target, *flags).code == 2


def _layers(pair) -> int:
    with open(f"{pair.target}/config.json") as file:
        return json.load(file)["num_hidden_layers"]
