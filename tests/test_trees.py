"""Token trees: a node sees its own path and nothing else, and is the text's once it was moved."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.errors import SettingError
from forerun.runtime.attention import FARTHEST, branches
from forerun.runtime.base import Rows
from marks import slow_but
from test_runtimes import CASES, Case, of_openvino
from tiny import LIMIT, VOCAB, texts

WIDEST = 12
"""Tokens of a random tree."""
NAMES = {
    *(f"torch-{family}" for family in ("llama", "gpt2", "gemma3_text")),
    *(f"cudagraphs-{family}" for family in ("llama", "gpt2", "gemma2")),
    *(f"openvino-{family}" for family in ("llama", "gpt2", "marian", "padded-llama")),
    *("encoder-t5", "encoder-bart", "scripted"),
}
QUICK = "torch-gemma3_text", "cudagraphs-gemma2", "openvino-gpt2", "openvino-padded-llama"


def random_parents(make: random.Random, count: int) -> list[int]:
    """Chains, combs and bushes."""
    branching = make.choice((0.0, 0.2, 0.5, 0.9))
    return [-1, *(make.randrange(i) if make.random() < branching else -1 for i in range(1, count))]


def path_to(parents: list[int], node: int) -> list[int]:
    """Places of the nodes from the root on."""
    path = [node]
    while path[0]:
        parent = parents[path[0]]
        path.insert(0, path[0] - 1 if parent < 0 else parent)
    return path


def judge_trees(case: Case, rows: Rows, make: random.Random) -> None:
    """One pass of ragged rows, some of them trees; then one node of each is kept."""
    rows.keep([])
    prompts = [
        [make.randrange(3, VOCAB) for _ in range(make.randint(1, LIMIT - WIDEST - 1))]
        for _ in range(make.randint(1, 3))
    ]
    rows.read(prompts)
    pieces, parents = [], []
    for text in prompts:
        count = make.randint(1, WIDEST)
        pieces.append([text[-1], *(make.randrange(3, VOCAB) for _ in range(count - 1))])
        parents.append(random_parents(make, count) if make.random() < 0.8 else [])
    wanted = [make.randint(1, len(piece)) for piece in pieces]
    starts = list(rows.lengths)
    logits = rows.feed(pieces, wanted, parents).cpu()
    kept = []
    for row, (text, piece, count) in enumerate(zip(prompts, pieces, wanted, strict=True)):
        paths = [path_to(parents[row] or [-1] * len(piece), node) for node in range(len(piece))]
        for node in range(len(piece) - count, len(piece)):
            tokens = [*text[:-1], *(piece[at] for at in paths[node])]
            got = logits[row, node - len(piece) + count]
            torch.testing.assert_close(got, case.alone(tokens)[-1], atol=1e-4, rtol=0)
        path = make.choice(paths)
        for depth, at in enumerate(path):
            rows.move(row, starts[row] + at, starts[row] + depth)
        rows.rollback(row, starts[row] + len(path))
        kept.append([*text[:-1], *(piece[at] for at in path)])
    following = [[make.randrange(3, VOCAB)] for _ in prompts]
    logits = rows.feed(following)[:, 0].cpu()
    for row, (text, token) in enumerate(zip(kept, following, strict=True)):
        torch.testing.assert_close(logits[row], case.alone(text + token)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "count"),
    slow_but(
        [*((name, 20) for name in sorted(NAMES)), *((name, 1000) for name in sorted(NAMES))],
        lambda name, count: name in QUICK and count == 20,
    ),
)
def test_a_node_is_its_own_path(name: str, count: int) -> None:
    case, make = CASES[name](), random.Random(7)
    rows = case.rows()
    assert rows.executor.trees
    for _ in range(count):
        judge_trees(case, rows, make)


def test_who_runs_layers_runs_no_trees() -> None:
    assert not CASES["layers-llama"]().make().trees


@pytest.mark.slow
def test_openvino_runs_no_trees_in_windows() -> None:
    """Its node cuts them by places of the cache, which in branches are not those of the text."""
    case = of_openvino("mistral-windowed")
    rows, text = case.rows(), texts(20)[0]
    assert not rows.executor.trees
    rows.read([text])
    torch.testing.assert_close(rows.feed([text[-1:]])[0], case.alone(text)[-1:], atol=1e-4, rtol=0)


def test_a_tree_is_no_wider_than_a_word() -> None:
    comb = [-1, *[0] * FARTHEST]
    assert branches(comb, len(comb))[1][-1] == -(1 << FARTHEST) | 1
    with pytest.raises(SettingError, match="make the tree smaller"):
        branches([*comb, 0], len(comb) + 1)
