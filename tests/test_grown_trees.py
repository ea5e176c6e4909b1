"""Trees that drafters grow: what they hold, what each node is, the same text in fewer rounds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.drafters import DRAFTERS
from forerun.drafters.base import Drafter
from forerun.drafters.eagle import Eagle
from forerun.drafters.model import ModelDrafter
from forerun.drafters.stepping import Branching
from forerun.drafters.trees import Tree
from forerun.engine import Completion, Engine, Sampling
from forerun.errors import SettingError
from forerun.governors import Seat
from forerun.governors.renewal import FREE, Renewal
from forerun.lab.traces.replay import replay
from forerun.requests import Request
from forerun.rules import RULES
from forerun.runtime import Rows
from forerun.testing import ScriptedModel, engine
from made_traces import periodic
from marks import spread
from test_eagle import saved
from test_eagle3 import DATA
from test_engine import V, chaotic, noisy
from test_leaves import PROMPTS, counted
from test_states import RUNTIMES
from tiny import LIMIT, build, texts

SPECS = "fixed(4,tree=12)", "auto(tree=16,cost=10,slope=0)"


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_the_likeliest_nodes_and_the_draft(seed: int) -> None:
    """Of all that was ever offered, by another way: the best paths first."""
    make, most = random.Random(seed), 3 + seed % 10
    tree, offered, drafted = Tree(most), dict[tuple[int, ...], float](), list[int]()

    def split(path: tuple[int, ...]) -> list[float]:
        weights = [make.random() ** 4 for _ in range(4)]
        shares = sorted((w / sum(weights) for w in weights), reverse=True)
        above = offered.get(path, 1.0)
        offered.update({(*path, token): above * share for token, share in enumerate(shares)})
        return shares

    for depth in range(4):
        if depth:
            drafted.append(0)
            tree.follow(0)
        newest = range(tree.known, len(tree.nodes)) if depth else [-1]
        paths = [tuple(tree.path(node)) for node in newest]
        assert tuple(drafted) == paths[tree.column]
        fed = [tuple(tree.path(node)) for node in range(len(tree.nodes))]
        tree.grow([split(path) for path in paths], [list(range(4))] * len(paths))
        for place, node in zip(tree.places, range(len(tree.nodes)), strict=True):
            assert [(), *fed][place] == tuple(tree.path(node))[:-1]
    drafted.append(0)
    own = {tuple(drafted[:n]) for n in range(1, len(drafted) + 1)}
    held = [tuple(tree.path(node)) for node in range(len(tree.nodes))]
    others = sorted(offered.keys() - own, key=lambda path: -offered[path])
    assert set(held) == own | set(others[: max(most - len(own), 0)])
    for kept in range(len(drafted) + 1):
        nodes, chances = tree.beside(drafted[:kept])
        paths = [tuple(drafted[:n]) for n in range(kept + 1)]
        for place, token in nodes:
            paths.append((*paths[place], token))
        assert len(set(paths)) == len(paths)
        assert set(paths[1:]) <= set(held)
        assert chances == sorted(chances, reverse=True)
        assert chances == pytest.approx([offered[path] for path in paths[kept + 1 :]])
        assert len(nodes) <= max(most - kept, 0)


class Likely:
    """Lends what trees need: the likeliest tokens."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, Any]] = []

    def likeliest(self, logits: torch.Tensor, paths: Any, count: int) -> Any:
        self.seen.append((logits, paths))
        best = logits.softmax(-1).topk(count, -1)
        return best.values.tolist(), best.indices.tolist()


def of_model(target: Rows, runtime: str, folder: Path) -> Drafter:
    return ModelDrafter(RUNTIMES[runtime](build("llama", seed=3)), 97)


def of_eagle(target: Rows, runtime: str, folder: Path) -> Drafter:
    return Eagle(saved(folder)).build(target, None)


def of_eagle3(target: Rows, runtime: str, folder: Path) -> Drafter:
    return DRAFTERS.make(f"eagle3(path={str(DATA / 'llama')!r})").build(target, None)


MAKERS = {"model": of_model, "eagle": of_eagle, "eagle3": of_eagle3}


@pytest.mark.parametrize(("runtime", "name"), spread(2, [*RUNTIMES], [*MAKERS]))
def test_a_node_is_what_its_own_path_would_be(name: str, runtime: str, tmp_path: Path) -> None:
    """In ragged rows, one of them a chain, what is said behind every node is what the drafter says
    behind its path alone; afterwards it holds the text."""
    rows = RUNTIMES[runtime](build("llama"))
    drafter: Any = MAKERS[name](rows, runtime, tmp_path)
    prompts = texts(9, 5, 13)
    rows.join(3, LIMIT)
    drafter.join(prompts, 40)
    rows.feed([prompt[:-1] for prompt in prompts], [0] * 3)
    drafter._read(prompts, leave=99)
    guide: Any = Likely()
    stepper = Branching(drafter, prompts, guide, [14, 0, 14])
    ahead = [list(prompt) for prompt in prompts]
    for _ in range(4):
        step = stepper.step(ahead, None)
        assert step.logits is not None
        for text, best in zip(ahead, step.logits.argmax(-1).tolist(), strict=True):
            text.append(best)
    assert sum(len(own[0]) for _, own in guide.seen) > 12
    assert max(len(tree.nodes) for tree in stepper.trees.values()) == 14
    loose = 0.06 if runtime == "openvino" and name != "model" else 1e-4
    for logits, paths in guide.seen:
        for row, own in enumerate(paths):
            for column, path in enumerate(own):
                if name != "model":
                    drafter._restore()
                drafter.rollback(row, len(prompts[row]) - 1)
                for count in range(len(path) + 1):
                    text = [*prompts[row], *path[:count]]
                    alone = drafter.step([text if r == row else None for r in range(3)], None)
                said = alone.logits[row]
                known = said.isfinite()
                wrong = (logits[row, column] - said)[known].abs().max()
                assert float(wrong / said[known].abs().max()) < loose


@pytest.mark.parametrize("how", [
    {},
    {"repetition_penalty": 1.3, "min_new_tokens": 8},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 5, "top_p": 0.8, "frequency_penalty": 0.4},
    {"stopping": lambda written: written[-2:] == [3, 4]},
], ids=["greedy", "penalised", "seeded", "truncated", "stopped"])  # fmt: skip
@pytest.mark.parametrize("drafted", [chaotic(3), noisy(chaotic(1), 2, 1.5)], ids=["far", "near"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_text_is_the_same_in_fewer_rounds(how: dict[str, Any], drafted: Any, rows: int) -> None:
    """Also where a branch ends the text, and to the end of the context, of target and draft."""
    script = chaotic(1)
    how = {"max_new_tokens": 50, "rule": "gumbel", **how}
    run = {
        spec: engine(ScriptedModel(script, 40), ScriptedModel(drafted, 38), eos=[6], max_rows=rows)(
            PROMPTS, controller=spec, **how
        )
        for spec in ("fixed(0)", "fixed(4)", *SPECS)
    }
    for spec in SPECS:
        assert [c.tokens for c in run[spec]] == [c.tokens for c in run["fixed(0)"]]
        assert [c.finish_reason for c in run[spec]] == [c.finish_reason for c in run["fixed(0)"]]
        assert all(sum(r.committed for r in c.rounds) == len(c.tokens) for c in run[spec])
        # A policy sees of a kept node what it would see without: a miss of the chain.
        assert all(r.accepted <= r.drafted for c in run[spec] for r in c.rounds)
    taken = [sum(c.stats.rounds for c in run[spec]) for spec in ("fixed(4)", SPECS[0])]
    assert taken[1] <= taken[0]


def test_a_poor_draft_gains_more_by_a_wider_tree() -> None:
    script = chaotic(1)
    pace = []
    for nodes in (4, 8, 16, 32):
        run = engine(ScriptedModel(script), ScriptedModel(noisy(script, 2, 1.5)))
        spec = f"fixed(4,tree={nodes})"
        done = run(PROMPTS, controller=spec, rule="exact", max_new_tokens=100)
        pace.append(400 / sum(c.stats.rounds for c in done))
        width = max(r.drafted + r.counters.get("leaves", 0) for c in done for r in c.rounds)
        assert width == nodes
    assert pace == sorted(pace)
    assert pace[3] > 1.3 * pace[0]


@pytest.mark.parametrize("how", [
    {"rule": "standard", "temperature": 1.0},
    {"rule": "ears", "temperature": 1.0},
    {"rule": "exact", "logprobs": 1},
], ids=["coins", "lossy", "scored"])  # fmt: skip
def test_others_draft_chains(how: dict[str, Any]) -> None:
    how = dict(how)
    made = Engine(ScriptedModel(chaotic(1)), ModelDrafter(ScriptedModel(chaotic(3)), V))
    sampling = Sampling(max_new_tokens=30, seed=1, temperature=how.pop("temperature", 0.0))
    controller, rule = CONTROLLERS.make(SPECS[0]), RULES.make(how.pop("rule"))
    made.submit(Request([0], sampling, controller, rule, **how))
    (done,) = (e.completion for e in made.run() if e.completion is not None)
    assert done.stats.drafted > 0
    assert not counted(done, "leaves")


def generated(
    target: Rows, drafter: Drafter, spec: str, rule: str = "exact", **how: Any
) -> list[Completion]:
    made = Engine(target, drafter, eos=frozenset({2}), max_rows=3)
    sampling = Sampling(max_new_tokens=60, **how)
    ids = [
        made.submit(p, sampling, CONTROLLERS.make(spec), RULES.make(rule))
        for p in texts(5, 9, 3, 12)
    ]
    done = {e.request: e.completion for e in made.run() if e.completion is not None}
    return [done[i] for i in ids]


@pytest.mark.parametrize(
    ("how", "name", "runtime", "family"),
    spread(
        4, [{}, {"temperature": 0.9, "seed": 7}], list(MAKERS), list(RUNTIMES), ["llama", "qwen2"]
    ),
)
def test_real_caches_follow(
    how: dict[str, Any], name: str, runtime: str, family: str, tmp_path: Path
) -> None:
    """Ragged batches up to the end of the context; what a path left in the target's is moved."""
    model = build(family)
    target = RUNTIMES[runtime](model)
    drafter = MAKERS[name](target, runtime, tmp_path)
    if name == "model":
        draft = build(family, seed=0)
        with torch.no_grad():
            for weight in draft.parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
                weight += 0.02 * noise
        drafter = ModelDrafter(RUNTIMES[runtime](draft), 97)
    rule = "gumbel" if how else "exact"
    plain, *trees = (generated(target, drafter, spec, rule, **how) for spec in ("fixed(0)", *SPECS))
    for tree in trees:
        assert [c.tokens for c in tree] == [c.tokens for c in plain]
        assert [c.finish_reason for c in tree] == [c.finish_reason for c in plain]
    assert sum(counted(c, "leaves") for c in trees[0]) > 20
    if name == "model":
        assert sum(counted(c, "leaves_kept") for c in trees[0]) > 2


@pytest.mark.parametrize("spec", SPECS)
def test_a_replay_refuses_trees(spec: str) -> None:
    with pytest.raises(SettingError, match=r"tree must be 0 in a replay.* got 1[26]"):
        replay(periodic(3), spec, Costs.synthetic(5))


def opened(costs: Costs, tree: int = 16) -> int:
    governor = Renewal(tree=tree)
    return governor.open(governor.start(), costs, {0: Seat()}, 1, 0).tree


def test_auto_grows_trees_where_their_nodes_are_next_to_free() -> None:
    assert opened(Costs.synthetic(10, 0.9 * FREE)) == 16
    assert opened(Costs.synthetic(10, 1.1 * FREE)) == 0
    assert opened(Costs.synthetic(10, 0.0), tree=0) == 0
    for level, nodes in ((8, 0), (12, 11)):
        steps = ((1, 1.0), (2, 1.01), (level, 1.01), (2 * level, 19.0))
        assert opened(Costs(0.1, steps, levels=(1, level))) == nodes
