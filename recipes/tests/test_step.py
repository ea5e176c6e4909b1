"""The hand-written training step against transformers' own model, and the early-exit loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from recipes.recipe import Architecture, Guide
from recipes.step import Functions, divergence, losses, states

PLAIN = Functions.make(compiled=False)
VOCAB = 70


@pytest.fixture
def model() -> Any:
    return made(Architecture(layers=3, hidden=32, heads=2, feed_forward=40), 0)


def made(architecture: Architecture, seed: int) -> Any:
    torch.manual_seed(seed)
    built = architecture.build(VOCAB)
    for p in built.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.15)
    return built


def batch(length: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, VOCAB, (2, length)), torch.rand(2, length)


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("length", [7, 128, 200])
def test_states_are_those_of_transformers(model: Any, length: int) -> None:
    ids, _ = batch(length)
    x, between = states(model, ids, PLAIN, frozenset((1, 2)))
    own = model.model(ids, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(model.model.norm(x), own.last_hidden_state)
    for depth in (1, 2):
        torch.testing.assert_close(between[depth], own.hidden_states[depth])


def test_loss_and_gradients_are_those_of_cross_entropy(model: Any) -> None:
    ids, weights = batch()
    loss, matched, _ = losses(model, ids, weights, PLAIN)
    assert matched == {}
    loss.backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    per_token = F.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")
    wanted = (per_token * weights[:, 1:]).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-4, atol=1e-4)


def test_an_exit_is_drawn_to_the_final_distribution_which_is_a_constant(model: Any) -> None:
    ids, weights = batch(20)
    positions = torch.arange(0, 38, 3)
    _, matched, _ = losses(model, ids, weights, PLAIN, (1,), positions)
    matched[1].backward()
    mine = {n: None if g is None else g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    out = model.model(ids, use_cache=False, output_hidden_states=True)
    final = model.lm_head(out.last_hidden_state[:, :-1]).softmax(-1).detach()
    shallow = model.lm_head(model.model.norm(out.hidden_states[1][:, :-1])).log_softmax(-1)
    per_token = -(final * shallow).sum(-1) * weights[:, 1:]
    wanted = per_token.reshape(-1)[positions].sum()
    wanted.backward()
    torch.testing.assert_close(matched[1], wanted)
    for name, p in model.named_parameters():
        deeper = "layers.1." in name or "layers.2." in name
        assert (mine[name] is None) == deeper, name
        if not deeper:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-4, atol=1e-5)


def test_an_exit_that_says_what_the_last_layer_says_is_left_alone(model: Any) -> None:
    ids, weights = batch(20)
    for p in model.model.layers[2].parameters():
        torch.nn.init.zeros_(p)  # the third layer adds nothing
    _, matched, _ = losses(model, ids, weights, PLAIN, (2,), torch.arange(38))
    matched[2].backward()
    assert all(g is None or g.abs().max() < 1e-5 for g in gradients(model).values())


def test_a_negative_weight_asks_for_the_opposite(model: Any) -> None:
    ids, weights = batch(30)
    weights[:, 15:] *= -1
    loss = losses(model, ids, weights, PLAIN).final
    loss.backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    log = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    opposite = (1 - log.exp()).log()
    weight = weights[:, 1:]
    wanted = -(torch.where(weight < 0, -weight * opposite, weight * log)).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-4, atol=1e-4)


def test_a_guide_is_the_attention_of_a_head_and_what_layers_after_it_say(model: Any) -> None:
    ids, weights = batch(20)
    places = torch.tensor([[0, 9, 3], [1, 17, 17]])
    guide = Guide(depth=1, head=1, answers=(2, 3), attention=1, answer=1)
    [(looks, says)] = losses(model, ids, weights, PLAIN, guided=[(guide, places)]).guides
    model.set_attn_implementation("eager")
    out = model.model(ids, output_attentions=True, output_hidden_states=True)
    row, asked, place = places.T
    torch.testing.assert_close(looks, -out.attentions[1][row, 1, asked, place].log().mean())
    # transformers has the last layer's state after the norm.
    states = [model.model.norm(out.hidden_states[2]), out.hidden_states[3]]
    entropies = [F.cross_entropy(model.lm_head(s[row, asked]), ids[row, asked + 1]) for s in states]
    torch.testing.assert_close(says, torch.stack(entropies).mean())


def test_divergence_trains_the_draft_only() -> None:
    target = made(Architecture(layers=2, hidden=32, heads=2, feed_forward=40), 0)
    draft = made(Architecture(layers=1, hidden=16, heads=1, feed_forward=24), 1)
    ids, weights = batch(30)
    value = divergence(target, draft, ids, weights, PLAIN)
    value.backward()
    assert all(g is None for g in gradients(target).values())
    wanted = target(ids).logits[:, :-1].softmax(-1)
    per_token = -(wanted * draft(ids).logits[:, :-1].log_softmax(-1)).sum(-1)
    torch.testing.assert_close(value, (per_token * weights[:, 1:]).sum())
    least = divergence(target, target, ids, weights, PLAIN)
    assert least < value


@torch.no_grad()
def test_in_bfloat16_the_losses_are_those_of_float32(model: Any) -> None:
    rounded = Functions(PLAIN.layer, PLAIN.score, PLAIN.match, torch.bfloat16)
    ids, weights = batch(40)
    positions = torch.arange(0, 70, 2)
    loss, matched, _ = losses(model, ids, weights, rounded, (1,), positions)
    exact, exactly, _ = losses(model, ids, weights, PLAIN, (1,), positions)
    assert float(loss) == pytest.approx(float(exact), rel=0.02)
    assert float(matched[1]) == pytest.approx(float(exactly[1]), rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_the_compiled_step_is_the_plain_one(model: Any) -> None:
    compiled = Functions.make(compiled=True)
    rounded = Functions(PLAIN.layer, PLAIN.score, PLAIN.match, torch.bfloat16)
    ids, weights = batch(256)
    positions = torch.arange(0, 500, 2)
    gained = []
    for functions in (compiled, rounded):
        loss, matched, _ = losses(model, ids, weights, functions, (1,), positions)
        (loss + matched[1]).backward()
        gained.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for one, two in zip(*gained, strict=True):
        assert (one - two).norm() < 0.03 * two.norm()  # in bfloat16, which some CPUs emulate
