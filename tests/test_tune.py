"""Searching parameters on a trace, judging them on another, and saying it to other engines."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as sample
from hypothesis import settings
from hypothesis import strategies as st

from forerun.controllers import CONTROLLERS
from forerun.errors import MissingExtraError, SettingError, UnknownNameError
from forerun.lab.traces import tune as lab
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.exports import EXPORTS, ExportJob, export
from forerun.lab.traces.replay import replay
from forerun.lab.traces.spaces import SPACES, OneOf
from forerun.lab.traces.tune import Tuned, disjoint, halves, search, speed, tunable, tune, verdict
from forerun.registry import Spec, parse
from made_traces import periodic, random_trace, trace_of

CELL = Cell.synthetic(10, slope=0.02)
SLOT = "candidate_steps"


@pytest.mark.parametrize("best", [0, 1, 3, 7])
def test_the_known_best_length_is_found(best):
    result = tune(periodic(best), CELL, ["fixed"]).best
    assert result.best == f"fixed(length={best})"
    assert result.after == pytest.approx(speed(periodic(best), f"fixed({best})", CELL))
    assert result.after >= result.before == speed(periodic(best), "fixed", CELL)


def test_the_length_found_is_the_best_of_all():
    trace = random_trace()
    result = tune(trace, CELL, ["fixed"], budget=1).fixed
    every = [speed(trace, f"fixed({n})", CELL) for n in range(trace.depth + 1)]
    assert CONTROLLERS.make(result.best).length == int(np.argmax(every))
    assert result.after == max(every)


def test_a_threshold_that_tells_hits_from_misses_is_found():
    # A hit has a top-1 probability of 0.9 and a miss one of 0.1.
    result = tune(random_trace(), CELL, ["gammatune+(early_stop=skip)"], budget=40).best
    made = CONTROLLERS.make(result.best)
    assert 0.1 < made.threshold <= 0.9
    assert made.early_stop == "skip"
    assert result.after > result.before > 1


def test_the_same_seed_finds_the_same():
    trace, names = random_trace(prompts=6, size=30), ["gammatune+", "goodput"]
    first, again = (tune(trace, CELL, names, budget=12, seed=3) for _ in range(2))
    assert first == again
    other = tune(trace, CELL, names, budget=12, seed=4)
    assert [f.best for f in other.results] != [f.best for f in first.results]


def test_every_controller_is_searched_within_the_budget_and_never_made_worse():
    trace = random_trace(prompts=4, size=30)
    tuned = tune(trace, CELL, budget=6)
    assert [f.name for f in tuned.results] == tunable()
    assert set(CONTROLLERS.names()) - {"bounded"} == set(tunable())
    for result in tuned.results:
        assert result.complete
        assert result.after >= result.before
        assert CONTROLLERS.text(CONTROLLERS.make(result.default)) == result.default
        assert result.after == speed(trace, result.best, CELL)
        assert result.trials <= (trace.depth + 2 if result.name == "fixed" else 6)
        assert (result.trials > 1) == (result.name in SPACES)
    assert tuned.best.after == max(f.after for f in tuned.results)


def test_what_a_spec_sets_stays():
    result = tune(random_trace(), CELL, ["gammatune(2, eta=0.9)"], budget=20).best
    made = CONTROLLERS.make(result.best)
    assert (made.length, made.eta) == (2, 0.9)
    assert made.delta != 4 or made.high != 24


def test_settings_a_controller_refuses_are_passed_over():
    # Shortest arms above the longest one, which the spec sets, are refused.
    result = tune(random_trace(), CELL, ["bandit(high=2)"], budget=30).best
    assert result.refused > 0
    assert result.trials == 30
    assert CONTROLLERS.make(result.best).high == 2


def test_a_controller_with_nothing_to_search_is_scored():
    result = tune(periodic(3), CELL, ["bounded(fixed(9), high=3)"]).best
    assert (result.trials, result.before) == (1, result.after)
    assert result.after == speed(periodic(3), "fixed(3)", CELL)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["gamatune"], "did you mean 'gammatune'"), (["bounded"], "needs 'inner'")],
)
def test_controllers_that_cannot_be_made_are_told_before_the_search(names, message):
    with pytest.raises(SettingError, match=message):
        tune(periodic(3), CELL, ["fixed", *names], progress=lambda *a: pytest.fail("searched"))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_seeds_that_are_none_are_told(seed):
    with pytest.raises(SettingError, match="seed must be"):
        tune(periodic(3), CELL, ["fixed"], seed=seed)


@pytest.mark.parametrize("name", SPACES)
def test_spaces_fit_their_controllers(name):
    known = {f.name for f in fields(CONTROLLERS.load(name)) if f.init}
    space = SPACES[name]
    assert set(space) <= known
    default = CONTROLLERS.make(name)
    for key, values in space.items():
        if isinstance(values, OneOf):
            assert getattr(default, key) in values.choices
        elif key not in ("length", "high"):  # of these the search stays below some defaults
            value = getattr(default, key)  # none: what is measured
            assert value is None or values.low <= value <= values.high
    for pick in (0, -1):
        ends = {
            k: v.choices[pick] if isinstance(v, OneOf) else (v.low, v.high)[pick]
            for k, v in space.items()
        }
        CONTROLLERS.make(Spec(name, (), ends))


@sample(st.integers(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_proposals_are_inside_the_space_and_as_many_as_said(budget, seed):
    space = SPACES["gammatune+"]
    values, total = lab.proposals(space, 10, CELL, budget + 1, seed)
    seen = 0
    for proposed, answer in values:
        assert set(proposed) == set(space)
        assert proposed["high"] <= 10
        assert 0 <= proposed["threshold"] <= 1
        answer(None if seen % 3 == 0 else float(seen))
        seen += 1
    assert (seen, total) == (budget, budget + 1)


def test_known_costs_are_tried_first():
    values, _ = lab.proposals(SPACES["goodput"], 10, Cell.synthetic(7, slope=0.03), 5, 0)
    assert next(values)[0] == {"cost": 7.0, "slope": 0.03}


def test_an_interrupt_keeps_the_best_so_far(monkeypatch):
    trace, left = random_trace(), 14 + 5

    def impatient(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return replay(*args)

    monkeypatch.setattr(lab, "replay", impatient)
    tuned = tune(trace, CELL, ["fixed", "gammatune", "svip"], budget=50)
    assert not tuned.complete
    assert [f.name for f in tuned.results] == ["fixed", "gammatune"]
    assert tuned.results[0].complete
    assert not tuned.results[1].complete
    assert 1 < tuned.results[1].trials <= 6
    assert tuned.results[1].after >= tuned.results[1].before
    with pytest.raises(KeyboardInterrupt):
        tune(trace, CELL, ["gammatune"], budget=50)


def test_progress_is_told():
    heard = []
    tune(periodic(3), CELL, ["svip"], budget=4, progress=lambda *what: heard.append(what))
    assert heard == [("svip", 1, 4), ("svip", 2, 4), ("svip", 3, 4), ("svip", 4, 4)]


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert tune(periodic(3), CELL, ["fixed"]).best.best == "fixed(length=3)"
    with pytest.raises(MissingExtraError, match=r"forerun\[lab\]"):
        tune(periodic(3), CELL, ["gammatune"])


def test_judging_compares_prompt_by_prompt():
    trace = random_trace(seed=1)
    result = search(parse("fixed"), random_trace(), CELL, budget=20)
    tuned = Tuned((result,), replace(result, best="fixed(length=1)"))
    document = verdict(tuned, trace, CELL, {}, False, 0)
    (one,), fixed = document["controllers"], document["best_fixed"]
    best, default = replay(trace, result.best, CELL), replay(trace, "fixed", CELL)
    short = replay(trace, "fixed(1)", CELL)

    def mean(ratios):
        return pytest.approx(np.exp(np.log(ratios).mean()))

    overall, families = one["test"], one["families"]
    assert overall["tuned"]["mean"] == mean(best.speedup)
    assert overall["gain"]["mean"] == mean(best.speedup / default.speedup)
    assert overall["over_fixed"]["mean"] == mean(best.speedup / short.speedup)
    assert fixed["overall"]["mean"] == mean(short.speedup)
    assert list(families) == ["a", "b"]
    easy = np.array(trace.families) == "a"
    assert families["a"]["tuned"]["mean"] == mean(best.speedup[easy])
    assert families["a"]["tuned"]["n"] == easy.sum()
    for cell in overall.values():
        assert cell["low"] <= cell["mean"] <= cell["high"]


@sample(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), min_size=2, max_size=25))
@settings(max_examples=60, deadline=None)
def test_halves_are_disjoint_whole_and_even(prompts):
    if len(set(prompts)) < 2:
        return
    names = tuple(f for f, _ in prompts), tuple(f"p{n}" for _, n in prompts)
    trace = trace_of(np.ones((len(prompts), 2)), 2, families=names[0], ids=names[1])
    first, second, how = halves(trace)
    keys = [set(zip(t.families, t.ids, strict=True)) for t in (first, second)]
    assert how.startswith("every other prompt")
    assert first.prompts
    assert second.prompts
    assert not keys[0] & keys[1]
    assert keys[0] | keys[1] == set(zip(*names, strict=True))
    assert first.prompts + second.prompts == len(prompts)
    for family in "abc":
        a, b = (sum(key[0] == family for key in side) for side in keys)
        assert abs(a - b) <= 1


def test_splits_that_ids_name_are_kept():
    ids = ("chat-val-000", "chat-test-000", "chat-val-001", "chat-test-001")
    first, second, how = halves(trace_of(np.ones((4, 2)), 2, ids=ids))
    assert (first.ids, second.ids) == (ids[::2], ids[1::2])
    assert how == "the ids' own splits"
    ids = ("contest-1", "val", "evaluation", "test-val-3")  # none of them, or not all, name one
    assert halves(trace_of(np.ones((4, 2)), 2, ids=ids))[2].startswith("every other")
    with pytest.raises(SettingError, match="`test`"):
        halves(trace_of(np.ones((1, 2)), 2))


def test_prompts_in_both_traces_are_refused():
    trace = random_trace()
    disjoint(trace.take([0, 1, 2]), trace.take([3, 4]))
    with pytest.raises(SettingError, match="1 prompts are in both traces"):
        disjoint(trace.take([0, 1, 2]), trace.take([2, 3]))
    # The same id alone, a line number perhaps, says nothing.
    disjoint(trace, replace(trace, tokens=trace.tokens + 1))


JOB = ExportJob(
    periodic(4),
    Cell.synthetic(10),
    [
        replace(Cell.synthetic(10, slope=s), batch=b)
        for b, s in [(8, 0.35), (1, 0), (2, 0), (32, 9)]
    ],
    budget=25,
)


def test_vllm_gets_the_best_length_of_each_batch_size():
    trace = random_trace()
    document = json.loads(export("vllm", replace(JOB, trace=trace)).text)
    rows = document["per_batch_size"]
    lengths = [row["num_speculative_tokens"] for row in rows]
    assert [row["batch"] for row in rows] == [1, 2, 8, 32]
    assert lengths[0] == lengths[1] > lengths[2] > lengths[3] == 0
    assert [row["use"] for row in rows] == ["draft", "draft", "draft", "disable"]
    config = document["speculative_config"]
    assert config == {
        "method": "draft_model",
        "model": "someone/draft",
        "num_speculative_tokens": lengths[0],
        "num_speculative_tokens_per_batch_size": [
            [1, 2, lengths[0]],
            [3, 8, lengths[2]],
            [9, 32, 0],
        ],
    }
    for row, cell in zip(rows, sorted(JOB.cells, key=lambda cell: cell.batch), strict=True):
        every = [speed(trace, f"fixed({n})", cell) for n in range(trace.depth + 1)]
        assert row["num_speculative_tokens"] == int(np.argmax(every))
        assert row["speedup_searched"] == round(max(every), 4)
    assert "\n" not in document["cannot"]


@sample(st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True), st.floats(0, 1))
@settings(max_examples=12, deadline=None)
def test_vllm_ranges_are_as_vllm_wants_them(batches, steep):
    cells = [replace(Cell.synthetic(10, slope=steep * b / 50), batch=b) for b in batches]
    document = json.loads(export("vllm", replace(JOB, cells=cells)).text)
    rows, config = document["per_batch_size"], document["speculative_config"]
    if config is None:
        assert all(row["use"] == "disable" for row in rows)
        return
    ranges = config.get("num_speculative_tokens_per_batch_size")
    if ranges is None:
        assert {row["num_speculative_tokens"] for row in rows} == {config["num_speculative_tokens"]}
        return
    # Its own checks: from 1, rising, without overlap, none above the maximum.
    assert ranges[0][0] == 1
    assert all(low <= high for low, high, _ in ranges)
    assert all(b[0] == a[1] + 1 and a[2] != b[2] for a, b in pairwise(ranges))
    assert max(k for *_, k in ranges) == config["num_speculative_tokens"] > 0
    for row in rows:
        (k,) = [k for low, high, k in ranges if low <= row["batch"] <= high]
        assert k == row["num_speculative_tokens"]


def test_transformers_takes_its_config_and_does_what_it_says(tmp_path):
    from transformers import GenerationConfig

    made = export("transformers", JOB)
    wanted = json.loads(made.text)["generation_config"]
    config = GenerationConfig()
    assert config.update(**wanted) == {}  # nothing it does not know
    config.validate()
    config.save_pretrained(tmp_path)
    again = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in wanted} == wanted
    # Whichever policy won, it drafts the four tokens there are to be had, and no more.
    (spec,) = made.specs
    assert speed(JOB.trace, spec, JOB.cell) >= speed(JOB.trace, "fixed(4)", JOB.cell)
    assert CONTROLLERS.make(spec).length == wanted["num_assistant_tokens"]


def test_transformers_drafts_as_long_as_its_config_says():
    import torch
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    import tiny

    wanted = json.loads(export("transformers", JOB).text)["generation_config"]
    target, assistant = tiny.build("llama", 0), tiny.build("llama", 1)
    assistant.generation_config.update(**wanted)
    seen = []
    real = AssistedCandidateGenerator.__init__

    def spy(self, *args, **kwargs):
        real(self, *args, **kwargs)
        seen.append((self.num_assistant_tokens, self.assistant_confidence_threshold))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistedCandidateGenerator, "__init__", spy)
        target.generate(
            torch.tensor([[5, 6, 7]]), assistant_model=assistant, max_new_tokens=6, do_sample=False
        )
    assert seen == [(wanted["num_assistant_tokens"], wanted["assistant_confidence_threshold"])]


@pytest.mark.parametrize("engine", EXPORTS)
def test_where_drafting_does_not_pay_exports_say_so(engine):
    slow = Cell.synthetic(0.5, slope=1)
    made = export(engine, replace(JOB, cell=slow, cells=[slow]))
    assert made.specs == ("fixed(length=0)",)
    assert made.cannot in made.text
    if engine == "llama.cpp":
        assert made.text.splitlines()[-1] == "--spec-type none"
    elif engine == "sglang":
        assert json.loads(made.text)["1"] == {"candidate_steps": [0]}
    else:
        kinds = {"exllamav3": "generator", "vllm": "speculative_config"}
        kinds |= {"tensorrt-llm": "speculative_config"}
        assert json.loads(made.text)[kinds.get(engine, "generation_config")] is None


def test_a_sampled_trace_is_exported_for_drafts_that_sample():
    trace = replace(JOB.trace, about={**JOB.trace.about, "sampling": {"temperature": 0.8}})
    made = export("vllm", replace(JOB, trace=trace))
    assert json.loads(made.text)["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert (
        "--spec-draft-sampling probabilistic" in export("llama.cpp", replace(JOB, trace=trace)).text
    )
    assert "probabilistic" not in export("vllm", JOB).text + export("llama.cpp", JOB).text


def test_tensorrt_llm_takes_a_length_by_batch_size_and_openvino_genai_one_of_two():
    config = json.loads(export("tensorrt-llm", JOB).text)["speculative_config"]
    lengths = {int(batch): length for batch, length in config["draft_len_schedule"].items()}
    assert max(lengths.values()) == config["max_draft_len"]
    assert set(lengths) == {cell.batch for cell in JOB.cells}
    made = export("openvino-genai", JOB)
    (setting,) = json.loads(made.text)["generation_config"].items()
    controller = CONTROLLERS.make(made.specs[0])
    assert setting in (
        ("num_assistant_tokens", controller.length),
        ("assistant_confidence_threshold", getattr(controller, "threshold", None)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["model", "lookup(n=4)"])
def test_openvino_genai_takes_its_config(drafts):
    genai = pytest.importorskip("openvino_genai")
    job = JOB if drafts == "model" else drafted_by(drafts)
    wanted = json.loads(export("openvino-genai", job).text)["generation_config"]
    config = genai.GenerationConfig(max_new_tokens=8, **wanted)
    config.validate()
    assert {name: getattr(config, name) for name in wanted} == pytest.approx(wanted)


def test_sglang_gets_a_slot_of_each_batch_size():
    made = export("sglang", JOB)
    slots = {key: entry for key, entry in json.loads(made.text).items() if key.isdigit()}
    assert list(map(int, slots)) == sorted(cell.batch for cell in JOB.cells)
    for entry, spec in zip(slots.values(), made.specs, strict=True):
        steps = entry["candidate_steps"]  # what its loader checks
        assert steps
        assert all(isinstance(step, int) and step >= 0 for step in steps)
        controller = CONTROLLERS.make(spec)
        assert steps == list(getattr(controller, "steps", [controller.length]))
        assert all(getattr(controller, name) == entry[name] for name in entry if name != SLOT)


def test_exllamav3_gets_a_length_and_a_confidence():
    arguments = json.loads(export("exllamav3", JOB).text)["generator"]
    assert 1 <= arguments["num_draft_tokens"] <= 32
    if arguments["dynamic_draft_tokens"]:
        assert 0 <= arguments["draft_confidence"] <= 1


def drafted_by(draft):
    about = {"draft": draft} if isinstance(draft, dict) else {"drafter": draft}
    return replace(JOB, trace=replace(JOB.trace, about={**JOB.trace.about, **about}))


def test_what_ships_is_named_by_its_folder_and_files_by_their_name():
    config = json.loads(export("vllm", drafted_by({"name": "shipped"})).text)["speculative_config"]
    assert Path(config["model"]).is_dir()
    named = export("llama.cpp", drafted_by({"name": "small.gguf"})).text
    assert "--spec-draft-model small.gguf" in named
    assert "--spec-draft-model DRAFT.gguf" in export("llama.cpp", JOB).text


@pytest.mark.parametrize("draft", ["lookup(n=4)", "suffix(n=8)"])
@pytest.mark.parametrize("engine", sorted(set(EXPORTS) - {"sglang"}))
def test_copied_drafts_have_other_engines_settings(engine, draft):
    """Greedily or sampled: such drafts have no distribution."""
    made = export(engine, drafted_by(draft))
    (length,) = {CONTROLLERS.make(spec).length for spec in made.specs} - {0} or {0}
    wanted = {
        "vllm": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "transformers": {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 4},
        "llama.cpp": ["--spec-type ngram-simple", "--spec-ngram-simple-size-n 4"],
        "tensorrt-llm": {"decoding_type": "NGram", "max_matching_ngram_size": 4},
        "openvino-genai": {"num_assistant_tokens": length, "max_ngram_size": 4},
        "exllamav3": {"ngram_match_min": 2, "num_draft_tokens": length},
    }[engine]
    if draft.startswith("suffix"):
        assert "suffix" in made.text or "8" in made.text or engine == "exllamav3"
    elif engine == "llama.cpp":
        assert set(wanted) < set(made.text.splitlines())
    else:
        document = json.loads(made.text)
        settings = next(v for k, v in document.items() if isinstance(v, dict))
        assert settings.items() >= wanted.items()


def test_llama_cpp_flags():
    made = export("llama.cpp", JOB)
    lines = made.text.splitlines()
    words = shlex.split("\n".join(lines), comments=True)
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert list(flags) == [
        "--spec-type", "--spec-draft-model", "--spec-draft-n-max", "--spec-draft-n-min",
        "--spec-draft-p-min",
    ]  # fmt: skip
    (spec,) = made.specs
    controller = CONTROLLERS.make(spec)
    longest = int(flags["--spec-draft-n-max"])
    assert controller.length == controller.low == controller.high == longest
    assert controller.threshold == float(flags["--spec-draft-p-min"])
    assert not controller.keep
    # The window never moves, so that only length and threshold count, as there.
    assert speed(JOB.trace, spec, JOB.cell) >= speed(JOB.trace, "fixed(4)", JOB.cell)


def test_an_unknown_export_is_told():
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama\.cpp'"):
        export("llamacpp", JOB)
