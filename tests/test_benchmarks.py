"""What the benchmarks record and replay is exactly what the live engine does."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from typer.main import get_command

from benchmarks import gpu, leniency, run
from benchmarks.common import Task, geometric, recorded
from benchmarks.gpu import enlarged
from benchmarks.headlines import HEADLINES, PAIR, measure
from benchmarks.leniency import Counted
from benchmarks.quality import coins
from benchmarks.real_tasks import right
from benchmarks.rouge import rouge
from benchmarks.rsd import Scorer, answers, verdict
from benchmarks.translator import Item
from benchmarks.trees import best_tree, kept_by, ranks_of, rounds_of
from forerun import Model
from forerun.cli import app
from forerun.drafters.model import ModelDrafter
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Rounds
from forerun.testing import ScriptedModel
from made_traces import trace_of
from test_engine import chaotic, noisy


@pytest.fixture(scope="module")
def model() -> Any:
    script = chaotic(31)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 32, 0.4))
    made = Model(target, ModelDrafter(draft, target.vocab_size))
    made.eos = frozenset({3})
    return made


@pytest.mark.parametrize(
    "spec",
    [
        "fixed(0)", "fixed(3)", "hf-heuristic(length=2)", "hf-threshold(threshold=0.5)",
        "gammatune", "gammatune(literal=true)", "gammatune+(threshold=0.5)",
        "gammatune+(threshold=0.6,keep=false,early_stop=skip)",
        "cm-asd(high=8)", "cm-asd(high=8,two_pass=true)", "svip", "adaedl", "exllama-ema",
        "sglang-ema", "goodput(cost=4)", "bandit", "bandit(policy=thompson)",
    ],
)  # fmt: skip
def test_replay_equals_the_live_engine(model: Any, spec: str) -> None:
    tokens = 40
    work = [
        *[Task("a", [i, 5], tokens) for i in range(7)],
        Task("b", [3], tokens, repetition_penalty=1.5),
        Task("a", [4, 5, 6], tokens),
    ]
    rounds: list[list[int]] = [[] for _ in work]

    def watch(now: Rounds) -> None:
        for i, drafted in zip(now.prompt, now.drafted, strict=True):
            rounds[i].append(int(drafted))

    replayed = replay(recorded(model, work), spec, Cell.synthetic(4), watch)
    for i, task in enumerate(work):
        live = model.generate(
            [task.tokens],
            controller=spec,
            max_new_tokens=tokens,
            repetition_penalty=task.repetition_penalty,
        )[0]
        assert replayed.rounds[i] == live.stats.rounds
        assert rounds[i] == [r.drafted for r in live.rounds]
        assert replayed.drafted[i] == live.stats.drafted


def test_trees_keep_what_leads_through_them_and_none_of_their_size_keeps_more() -> None:
    random = np.random.default_rng(0)
    rank = random.choice(4, (6, 40), p=(0.55, 0.25, 0.15, 0.05))
    ahead = np.pad(rank, ((0, 0), (0, 8)))
    deep = np.stack([ahead[:, i : i + 40] for i in range(8)], -1).astype(float)
    trace = trace_of(rank == 0, 8)
    trace = replace(trace, judged=trace.judged | {"target_rank": deep})
    ranks = ranks_of(trace, 4)
    chain = (ranks == 0).cumprod(-1).sum(-1)
    fixed = replay(trace, "fixed(4)", Cell.synthetic(4))
    assert rounds_of(trace, chain).tolist() == fixed.rounds.tolist()
    paths = ranks[trace.valid]
    for nodes in (1, 3, 7):
        best = kept_by(best_tree(paths, nodes), ranks)
        for _ in range(100):
            tree: list[tuple[int, ...]] = [()]
            while len(tree) <= nodes:
                node = (*tree[random.integers(len(tree))], int(random.integers(3)))
                tree += [node] * (node not in tree and len(node) <= 4)
            assert kept_by(tree[1:], ranks).sum() <= best.sum()
        assert (best <= np.minimum(4, 40 - np.arange(40))).all()


def test_geometric_mean_and_interval() -> None:
    cell = geometric([1.0, 2.0, 4.0])
    assert cell["mean"] == pytest.approx(2.0)
    assert cell["low"] <= cell["mean"] <= cell["high"]
    assert cell["n"] == 3


def test_texts_are_sampled_with_coins_of_their_own() -> None:
    seeds = [how.seed for how in coins(3, seed=1000, temperature=0.9)]
    assert seeds == [1000, 1001, 1002]


@pytest.mark.parametrize(
    ("written", "right"),
    [
        (["27 * 8 (wrong on the way) = 216.", "216 - 6 = 210.", "The answer is 210."], [True] * 3),
        (["8 * 27 = 216.", "216 - 7 = 209.", "209 - 1 = 208."], [True, False]),
        (["27 * 8 = 215."], [False]),
        (["27 * 8 = 216.", "The answer is 216."], [True, False]),
        (["27 * 8 = 216.", "216 - 6 = 210.", "210 + 0 = 210."], [True, True, False]),
        (["27 / 0 = 216."], [False]),
        (["Well."], [False]),
    ],
)
def test_a_step_is_right_if_its_result_is_true_and_needed(
    written: list[str], right: list[bool]
) -> None:
    worked = ["27 * 8 (7 * 8 = 56, 2 * 8 + 5 = 21) = 216.", " 216 - 6 = 210."]
    assert verdict(written, worked) == right


class Writer:
    """Writes one token for every step, by its place; the prompt is one token."""

    eos = frozenset({0})
    tokenizer = SimpleNamespace(
        decode=lambda ids: "".join(["", " 2 + 2 = 5.", " 2 + 2 = 4.", " The answer is 4."][i]
                                   for i in ids)
    )  # fmt: skip

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def generate(self, texts: list[list[int]], **how: Any) -> list[Any]:
        return [SimpleNamespace(tokens=[self.steps[len(text) - 1]]) for text in texts]


@pytest.mark.parametrize(("threshold", "text", "kept"), [(0.5, 4, 1), (0.0, 5, 2), (1.5, 4, 0)])
def test_rsd_keeps_a_step_of_the_drafts_if_its_reward_is_high(
    threshold: float, text: int, kept: int
) -> None:
    scorer = SimpleNamespace(rewards=lambda texts: [float(t[-1] != 1) for t in texts])
    made = answers(Writer(2, 3), Writer(1, 3), scorer, [[7], [8]], threshold=threshold)
    assert [a.text for a in made] == [f" 2 + 2 = {text}. The answer is 4."] * 2
    assert [(a.steps, a.kept, a.tokens) for a in made] == [(2, kept, 3)] * 2


def test_rsd_ends_with_the_text_or_its_limit() -> None:
    scorer = SimpleNamespace(rewards=lambda texts: [1.0] * len(texts))
    assert answers(Writer(), Writer(1, 0), scorer, [[7]])[0].tokens == 2
    assert answers(Writer(), Writer(*[1] * 9), scorer, [[7]], limit=4)[0].steps == 4


def test_a_step_is_scored_alike_alone_and_with_others() -> None:
    scorer = Scorer()
    texts = [[50, 60, 70], [50, 60, 70, 80, 90], [50, 60, 71, 72], [9, 8]]
    together = scorer.states(texts)
    alone = torch.cat([scorer.states([text]) for text in texts])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)


def test_an_enlarged_model_computes_what_the_small_one_does() -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(
        vocab_size=97, intermediate_size=48, num_hidden_layers=2, tie_word_embeddings=True, **shape
    )
    torch.manual_seed(0)
    small = hf.LlamaForCausalLM(config).eval()
    more = {"hidden_size": 128, "num_attention_heads": 12, "num_key_value_heads": 4}
    large = enlarged(small, {**more, "intermediate_size": 64, "num_hidden_layers": 3})
    ids = torch.randint(97, (1, 11))
    with torch.no_grad():
        wanted, got = small(ids).logits, large(ids).logits
    assert large.config.hidden_size == 128
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_rouge_by_hand() -> None:
    """Of 6 words 5 are shared, of 5 pairs 1; "the cat on mat" is in order."""
    scores = rouge(["The cat sat on the mat."], ["the cat, on a mat the"])
    assert scores == pytest.approx((100 * 5 / 6, 100 * 1 / 5, 100 * 4 / 6))
    assert rouge(["a b", "a"], ["", "A!"]) == (50.0, 0.0, 50.0)


def test_rouge_is_that_of_the_package() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(
        ["rouge1", "rouge2", "rougeL"]
    )
    rng, words = random.Random(0), ["a", "b", "c", "The", "Cat,", "5", "Öl", "x-y", ";"]
    for _ in range(100):
        wanted, text = (" ".join(rng.choices(words, k=9)) for _ in "ab")
        one = scorer.score(wanted, text)
        assert rouge([wanted], [text]) == pytest.approx([100 * s.fmeasure for s in one.values()])


@pytest.mark.slow
@pytest.mark.parametrize("texts", [False, True])
def test_the_benchmark_of_a_gpu_runs_through(tmp_path: Path, texts: bool) -> None:
    """The shipped pair without graphs on the CPU: every part is there and every text the same."""
    gpu.main(tmp_path, 600, tiny=True, texts=texts)
    parts = json.loads((tmp_path / f"gpu{'-texts' * texts}.json").read_text())
    assert not [name for name, part in parts.items() if "failed" in str(part)]
    kinds = ("long",) if texts else ("short", "transformers")
    batches = [f"{kind} {n}" for n in gpu.TINY_BATCHES for kind in kinds]
    others = ["copy", "machine"]
    if not texts:
        others += ["passes target", "passes draft", "vocabulary"]
    assert {*batches, *others} == set(parts)
    for name in batches:
        for method, cell in parts[name].items():
            if isinstance(cell, dict):
                right, of = map(int, cell["identical"].split("/"))
                assert (right, cell["tokens/s"] > 0) == (of, True), (name, method)


# --- the papers ----------------------------------------------------------------------------------


def test_every_headline_has_commands_and_every_command_a_headline() -> None:
    page = (Path(__file__).parents[1] / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    header, *cells = [row.strip("| ").split(" | ") for row in rows]
    assert header[-1] == "command"
    commands = [re.findall(r"`([^`]+)`", row[-1]) for row in cells]
    assert [row for row, named in zip(cells, commands, strict=True) if not named] == []
    assert {command for named in commands for command in named} == set(HEADLINES)
    not_here = [row[3] for row in cells if row[3].startswith("not")]
    assert [verdict for verdict in not_here if "ould decide" not in verdict] == []


@pytest.mark.parametrize("line", [*PAIR, *HEADLINES])
def test_every_command_of_a_headline_can_be_read(line: str) -> None:
    words = shlex.split(line)
    tool: Any = get_command(app if words[0] == "forerun" else run.app)
    words = words[words[0] == "forerun" :]
    tool.commands[words[0]].make_context(words[0], words[1:])


def test_commands_without_what_they_need_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[str]] = []
    done = SimpleNamespace(returncode=1)
    monkeypatch.setattr("subprocess.run", lambda argv, **how: runs.append(argv[2:]) or done)
    with pytest.raises(SystemExit, match="failed: easd-speed"):
        measure({"QWEN": [], "SMOLLM2": ["a"], "DATA": ["b"]}, ["easd-gsm8k", "easd-speed"])
    assert runs == [["benchmarks.run", "easd-speed", "0.2498", "--problems", "20"]]
    assert "left out: easd-gsm8k QWEN SMOLLM2 DATA --count 200: no QWEN" in capsys.readouterr().err


def test_a_gain_is_compared_at_equal_drift() -> None:
    """`ears` at 1 + 5 drift, `priced` at 1 + 10 drift of `standard`'s tokens a round."""
    tokens, texts = 120.0, np.ones(3)
    standard = Counted(tokens * texts, 40 * texts, 0 * texts)
    counted = {"standard": standard, leniency.PRICED: Counted(
        tokens * texts, 40 / 1.2 * texts, 0.02 * tokens * texts
    )}  # fmt: skip
    for beta in leniency.BETAS:
        rounds = 40 / (1 + beta) * texts
        counted[f"ears(beta={beta})"] = Counted(tokens * texts, rounds, beta / 5 * tokens * texts)
    gain = leniency._gain(counted)
    assert [gain[key] for key in ("mean", "low", "high")] == pytest.approx([2.0] * 3)
    assert leniency._equal_beta(counted) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "good"),
    [("16 - 7 = 9, so $1,018.", True), ("#### 1018.0", True), ("1018 or 18", False), ("", False)],
)
def test_the_last_number_is_the_answer(text: str, good: bool) -> None:
    assert right(text, Item("", ("9 * 2 = <<9*2=18>>18\n#### 1,018",))) == good
