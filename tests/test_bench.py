"""The bench: pairing, what is kept, what the figures mean, and peers behind a pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import run
from forerun import Model
from forerun.drafters.model import ModelDrafter
from forerun.errors import PromptError, SettingError
from forerun.lab.bench import bench, report
from forerun.lab.bench.bench import Ours, Results, groups, key, load, measure
from forerun.lab.bench.peers import Peer, PeerError, Run, named
from forerun.lab.bench.report import ALL, PLAIN
from forerun.prompts import Prompt
from forerun.requests import Sampling
from forerun.testing import ScriptedModel
from test_engine import chaotic, noisy

MACHINE: dict[str, Any] = {"date": "2026-01-01", "cpu": "none × 1", "versions": {"forerun": "0"}}
SETTINGS: dict[str, Any] = {
    "target": "t",
    "draft": "d",
    "max_new_tokens": 8,
    "temperature": 0.0,
    "batch": [1],
}


def task(family: str, number: int, tokens: int = 8, **how: Any) -> Prompt:
    sampling = Sampling(max_new_tokens=tokens, **how)
    return Prompt(
        "", id=f"{family}-{number}", family=family, ids=[number + 1, 2], sampling=sampling
    )


@dataclass
class Scripted:
    """A method that takes so many seconds per token."""

    name: str
    pace: float = 1.0
    kind: Any = "forerun"
    largest_batch: int | None = None
    fails_after: int | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("out of\nluck"))
    log: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    tokens: int | None = None
    certain: bool = True

    def run(self, tasks):
        if self.fails_after is not None and len(self.log) >= self.fails_after:
            raise self.error
        self.log.append((self.name, tuple(t.id for t in tasks)))
        texts = [[7] * (self.tokens or t.sampling.max_new_tokens) for t in tasks]
        seconds = self.pace * sum(map(len, texts))
        if self.kind == "peer":
            return Run(seconds, texts)
        ones = [1] * len(tasks)
        return Run(seconds, texts, [0.5] * len(tasks), ones, ones, ones, {1: len(tasks)})

    def about(self):
        return {"name": self.name, "kind": self.kind}


def scripted(*more: Scripted) -> list[Any]:
    log: list[Any] = []
    methods = [Scripted(PLAIN, kind="plain"), Scripted("twice", 0.5), *more]
    for method in methods:
        method.log = log if method.fails_after is None else method.log
    return methods


def measured(folder: Path, methods, work, **more) -> Results:
    results = Results.open(folder, SETTINGS, MACHINE, methods)
    measure(results, work, methods, **more)
    return results


def sampled(name: str, kind: str, paces: dict[tuple[str, str], float]) -> dict[str, Any]:
    """A document's method and its samples, 10 tokens each."""
    samples = [
        {
            "method": name, "batch": 1, "family": family, "prompts": [prompt],
            "seconds": pace * 10, "tokens": [10], "ttft": None, "rounds": None, "drafted": None,
            "accepted": None, "lengths": None, "identical": [True], "digest": ["x"],
        }
        for (family, prompt), pace in paces.items()
    ]  # fmt: skip
    return {"method": {"name": name, "kind": kind}, "samples": samples}


def document(**paces: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Results of methods with given seconds per token; `p_...` are peers."""
    made = [
        sampled(n, "plain" if n == PLAIN else "peer" if n.startswith("p_") else "forerun", p)
        for n, p in paces.items()
    ]
    return {
        "schema": 1,
        "kind": "bench",
        "complete": True,
        "settings": SETTINGS,
        "provenance": [MACHINE],
        "methods": [m["method"] for m in made],
        "skipped": [],
        "samples": [s for m in made for s in m["samples"]],
    }


KEYS = [("a", "1"), ("a", "2"), ("b", "3"), ("b", "4")]
MORE = [("a" if i < 6 else "b", str(i)) for i in range(12)]


class TestGroups:
    def test_families_take_turns_and_fill_batches(self):
        tasks = [task("a", i) for i in range(5)] + [task("b", i) for i in range(4)]
        made = groups(tasks, [1, 2])
        ones, twos = made[:9], made[9:]
        assert [g[0].family for g in ones] == list("ababababa")
        assert [[p.id for p in g] for g in twos] == [
            ["a-0", "a-1"], ["b-0", "b-1"], ["a-2", "a-3"], ["b-2", "b-3"],
        ]  # fmt: skip
        assert len({key(g) for g in made}) == len(made)

    def test_a_batch_that_cannot_be_filled_is_told(self):
        with pytest.raises(PromptError, match="1 prompts of b do not fill a batch of 2"):
            groups([task("a", 0), task("a", 1), task("b", 0)], [2])


class TestMeasure:
    def test_methods_run_side_by_side_and_none_always_follows_another(self, tmp_path):
        methods = scripted(Scripted("third"))
        work = groups([task("a", i) for i in range(12)], [1])
        progress: list[tuple[int, int]] = []
        measured(tmp_path, methods, work, tell=lambda *at: progress.append(at))
        log = methods[0].log[3:]  # after one warm-up each
        orders = [tuple(name for name, _ in log[i : i + 3]) for i in range(0, 36, 3)]
        assert all(sorted(order) == sorted([PLAIN, "twice", "third"]) for order in orders)
        assert len(set(orders)) > 3  # a rotation has three
        assert [ids for _, ids in log[:3]] == [("a-0",)] * 3
        assert progress == [(i, 36) for i in range(37)]

    def test_every_sample_is_in_the_file(self, tmp_path):
        work = groups([task("a", i) for i in range(4)], [1, 2])
        results = measured(tmp_path, scripted(), work)
        stored = load(tmp_path)
        assert stored == load(tmp_path / "results.json") == results.document
        assert stored["complete"]
        assert len(stored["samples"]) == 2 * (4 + 2)
        last = stored["samples"][-1]
        assert (last["method"], last["batch"], last["prompts"]) == ("twice", 2, ["a-2", "a-3"])
        assert (last["tokens"], last["identical"]) == ([8, 8], [True, True])
        assert last["lengths"] == {"1": 2}

    def test_sampled_outputs_need_not_be_identical(self, tmp_path):
        work = groups([task("a", 0)], [1])
        longer = Scripted("longer", tokens=9, certain=False)
        results = measured(tmp_path, scripted(longer), work)
        assert [s["identical"] for s in results.document["samples"]] == [[True], [True], None]

    def test_a_longer_output_is_not_identical(self, tmp_path):
        results = measured(
            tmp_path, scripted(Scripted("longer", tokens=9)), groups([task("a", 0)], [1])
        )
        assert [s["identical"] for s in results.document["samples"]] == [[True], [True], [False]]

    def test_interrupted_it_keeps_what_is_complete_and_goes_on(self, tmp_path):
        work = groups([task("a", i) for i in range(4)], [1])
        stops = Scripted("stops", 0.25, fails_after=3, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path, scripted(stops), work)
        stored = load(tmp_path)
        assert not stored["complete"]
        assert [s["prompts"][0] for s in stored["samples"]] == ["a-0"] * 3 + ["a-1"] * 3
        methods = scripted(Scripted("stops", 0.25))
        progress: list[tuple[int, int]] = []
        resumed = measured(tmp_path, methods, work, tell=lambda *at: progress.append(at)).document
        assert {ids for _, ids in methods[0].log[3:]} == {("a-2",), ("a-3",)}
        assert (progress[0], progress[-1]) == ((6, 12), (12, 12))
        assert resumed["complete"]
        assert len(resumed["provenance"]) == 2
        assert len({(s["method"], *s["prompts"]) for s in resumed["samples"]}) == 12

    @pytest.mark.parametrize("what", ["settings", "methods", "models"])
    def test_other_results_are_not_mixed_in(self, tmp_path, what):
        work = groups([task("a", 0)], [1])
        measured(tmp_path, scripted(), work)
        how = SETTINGS | ({"seed": 3} if what == "settings" else {})
        methods = scripted(*([Scripted("new")] if what == "methods" else []))
        machine = MACHINE | ({"draft": "another"} if what == "models" else {})
        with pytest.raises(SettingError, match="name another folder"):
            Results.open(tmp_path, how, machine, methods)

    def test_a_peer_that_fails_is_left_out_with_its_reason(self, tmp_path):
        peer = Scripted("p", kind="peer", fails_after=2)
        work = groups([task("a", i) for i in range(3)], [1])
        results = measured(tmp_path, scripted(peer), work).document
        assert results["skipped"] == [
            {"name": "p", "reason": "failed on a-1: RuntimeError: out of luck"}
        ]
        assert {s["method"] for s in results["samples"]} == {PLAIN, "twice"}
        assert results["complete"]
        assert [m["name"] for m in report.methods(results)] == [PLAIN, "twice"]

    def test_our_own_failure_is_not_hidden(self, tmp_path):
        with pytest.raises(RuntimeError):
            measured(tmp_path, scripted(Scripted("x", fails_after=1)), groups([task("a", 0)], [1]))

    def test_what_takes_one_prompt_is_not_asked_for_more(self, tmp_path):
        one = Scripted("p", kind="peer", largest_batch=1)
        work = groups([task("a", i) for i in range(2)], [1, 2])
        results = measured(tmp_path, scripted(one), work).document
        assert [s["batch"] for s in results["samples"] if s["method"] == "p"] == [1, 1]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "is no results file"),
            ("[]", "is no results file"),
            ('{"schema": 1}', "is no results file"),
            ('{"kind": "bench", "schema": 2}', "has schema 2 and this forerun reads 1"),
        ],
    )
    def test_files_that_are_no_results(self, tmp_path, text, words):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(SettingError, match=words):
            load(tmp_path)


@pytest.fixture(scope="module")
def model():
    script = chaotic(31)
    target = ScriptedModel(script)
    made = Model(target, ModelDrafter(ScriptedModel(noisy(script, 32, 0.4)), target.vocab_size))
    made.eos = frozenset({3})
    return made


class TestOurs:
    def test_it_counts_what_the_engine_counts(self, model):
        tasks = [task("a", i, 30) for i in range(3)]
        plain, ours = (Ours("x", model, c).run(tasks) for c in (None, "fixed(3)"))
        assert plain.tokens == ours.tokens
        assert plain.rounds == [len(t) for t in plain.tokens]
        assert sum(ours.lengths.values()) == sum(ours.rounds) < sum(plain.rounds)
        assert sum(k * n for k, n in ours.lengths.items()) == sum(ours.accepted)
        assert all(0 < t <= ours.seconds for t in ours.ttft)

    @pytest.mark.parametrize("rule", ["gumbel", "standard"])
    def test_sampled_texts_have_one_length_and_the_seed_decides(self, model, rule):
        tasks = [task("a", i, 12, temperature=1.0, ignore_eos=True, seed=i) for i in range(3)]
        how = {"rule": rule, "sampled": True}
        methods = [Ours("x", model, c, **how) for c in (None, "fixed(2)", "fixed(2)")]
        plain, ours, again = (m.run(tasks) for m in methods)
        assert [len(t) for r in (plain, ours) for t in r.tokens] == [12] * 6
        assert again.tokens == ours.tokens
        assert (ours.tokens == plain.tokens) == methods[1].certain == (rule == "gumbel")

    def test_about(self, model):
        about = Ours("x", model, "fixed(3)", "ears(beta=0.3)").about()
        assert about["rule"].startswith("ears")
        assert about["lossless"] is False
        assert Ours(PLAIN, model).about() == {"name": PLAIN, "kind": "plain"}


class TestFigures:
    def test_speedups(self):
        paces = {
            PLAIN: dict.fromkeys(KEYS, 2.0),
            "x": dict(zip(KEYS, [1.0, 1.0, 4.0, 1.0], strict=True)),
        }
        cells = {(c["method"], c["family"]): c for c in report.cells(document(**paces))}
        assert cells["x", "a"]["speedup"] == pytest.approx({"mean": 2, "low": 2, "high": 2, "n": 2})
        assert cells["x", "b"]["speedup"]["mean"] == pytest.approx(1.0)
        overall = cells["x", ALL]
        assert overall["speedup"]["mean"] == pytest.approx(2**0.5)
        assert overall["ratios"] == pytest.approx([2, 2, 0.5, 2])
        assert overall["tokens_per_second"] == pytest.approx(40 / 70)
        assert overall["ms_per_token"] == pytest.approx(1750)
        assert cells[PLAIN, ALL]["speedup"]["mean"] == 1

    def test_writing_more_tokens_is_no_speedup(self):
        made = document(**{PLAIN: dict.fromkeys(KEYS, 2.0), "x": dict.fromkeys(KEYS, 2.0)})
        for s in made["samples"]:
            if s["method"] == "x":
                s["tokens"], s["seconds"] = [20], 40.0
        speedups = [c["speedup"]["mean"] for c in report.cells(made) if c["method"] == "x"]
        assert speedups == pytest.approx([1.0] * 3)

    def test_a_method_is_paired_with_plain_on_its_own_prompts(self):
        paces = {PLAIN: dict(zip(KEYS, [1.0, 1.0, 8.0, 8.0], strict=True)), "x": {KEYS[0]: 0.5}}
        cells = [
            c for c in report.cells(document(**paces)) if (c["method"], c["family"]) == ("x", ALL)
        ]
        assert [(c["speedup"]["mean"], c["speedup"]["n"]) for c in cells] == [(2.0, 1)]

    def test_latency_is_what_one_reader_waits(self, tmp_path):
        work = groups([task("a", i) for i in range(4)], [1, 4])
        results = measured(tmp_path, scripted(), work).document
        at = {(c["batch"], c["method"]): c for c in report.cells(results) if c["family"] == ALL}
        assert at[1, PLAIN]["ms_per_token"] == pytest.approx(1000)
        assert at[4, PLAIN]["ms_per_token"] == pytest.approx(4000)
        assert at[1, PLAIN]["tokens_per_second"] == at[4, PLAIN]["tokens_per_second"] == 1

    def test_peers(self):
        paces = {
            PLAIN: dict.fromkeys(KEYS, 4.0), "x": dict.fromkeys(KEYS, 1.0),
            "p_a": dict.fromkeys(KEYS, 3.0),
            "p_b(tokens=1)": dict.fromkeys(KEYS, 2.0), "p_b(tokens=2)": dict.fromkeys(KEYS, 1.5),
        }  # fmt: skip
        made = document(**paces)
        ratios = {k: v["mean"] for k, v in report.against(made, 1).items()}
        assert ratios["x", "p_a"] == pytest.approx(3)
        assert ratios[PLAIN, "p_b(tokens=2)"] == pytest.approx(0.375)
        text = drawn(made, report.cells(made))
        assert (
            "the settings of <code>p_b</code> measured here is <code>p_b(tokens=2)</code>" in text
        )

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
        st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
        st.floats(0.1, 10),
    )
    def test_intervals_hold_the_mean_and_units_cancel(self, plain, mine, unit):
        def made(k):
            paces = ([p * k for p in plain], [p * k for p in mine])
            return document(**{n: dict(zip(KEYS, p, strict=True))
                               for n, p in zip((PLAIN, "x"), paces, strict=True)})  # fmt: skip

        for one, other in zip(report.cells(made(1)), report.cells(made(unit)), strict=True):
            s = one["speedup"]
            assert s["low"] <= s["mean"] * 1.000001
            assert s["mean"] <= s["high"] * 1.000001
            assert s == pytest.approx(other["speedup"])


SLOW = {key: 4.0 + 0.1 * (i % 3) for i, key in enumerate(MORE)}
QUICK = {key: 2.0 + 0.1 * (i % 4) for i, key in enumerate(MORE)}


class TestCompare:
    def verdicts(self, a, b):
        return {(c["method"], c["family"]): c["verdict"] for c in report.compare(a, b)}

    def test_nothing_changed(self):
        a = document(**{PLAIN: SLOW, "x": QUICK})
        changes = report.compare(a, a)
        assert {c["verdict"] for c in changes} == {"within noise"}
        assert all(c["seconds"]["mean"] == 1 and c["same_text"] == 1 for c in changes)
        assert {(c["method"], c["family"]) for c in changes} == {
            (m, f) for m in (PLAIN, "x") for f in ("a", "b", ALL)
        }

    def test_a_method_got_faster(self):
        a = document(**{PLAIN: SLOW, "x": QUICK})
        b = document(**{PLAIN: SLOW, "x": {k: v * 0.9 for k, v in QUICK.items()}})
        verdicts = self.verdicts(a, b)
        assert (verdicts["x", ALL], verdicts[PLAIN, ALL]) == ("faster", "within noise")
        assert self.verdicts(b, a)["x", ALL] == "slower"

    def test_a_busier_machine_is_no_change_of_a_method(self):
        a = document(**{PLAIN: SLOW, "x": QUICK})
        b = document(**{n: {k: v * 1.5 for k, v in p.items()}
                        for n, p in ((PLAIN, SLOW), ("x", QUICK))})  # fmt: skip
        verdicts = self.verdicts(a, b)
        assert (verdicts["x", ALL], verdicts[PLAIN, ALL]) == ("within noise", "slower")

    @pytest.mark.parametrize(("n", "verdict"), [(1, "within noise"), (5, "within noise"),
                                                (6, "faster"), (12, "faster")])  # fmt: skip
    def test_few_prompts_prove_nothing(self, n, verdict):
        def paced(factor):
            keys = [("a", str(i)) for i in range(n)]
            return document(**{PLAIN: dict.fromkeys(keys, 4.0), "x": dict.fromkeys(keys, factor)})

        verdicts = self.verdicts(paced(2.0), paced(1.0))
        assert (verdicts["x", ALL], verdicts[PLAIN, ALL]) == (verdict, "within noise")

    def test_noise_is_seldom_called_a_change(self):
        """Of 200 comparisons of 16 pairs without a change at most 22 may be called one.

        At a true rate of 5 % more would be seen in fewer than 1 of 1000 runs; the seed is fixed.
        """
        draw = np.random.default_rng(1).normal(0, 0.1, (200, 16))
        assert sum(report.by_chance(np.exp(logs)) < report.LEVEL for logs in draw) <= 22
        assert report.by_chance(np.exp(draw[0] + 0.2)) < 0.01

    def test_only_what_both_have(self):
        a = document(**{PLAIN: SLOW, "x": QUICK, "old": QUICK})
        family_a = {k: v for k, v in SLOW.items() if k[0] == "a"}
        b = document(**{PLAIN: family_a, "x": family_a, "new": family_a})
        changes = report.compare(a, b)
        assert {(c["method"], c["family"]) for c in changes} == {
            (m, f) for m in (PLAIN, "x") for f in ("a", ALL)
        }
        assert {c["seconds"]["n"] for c in changes} == {6}


VLLM = """
import os, sys
__version__ = "9.9"
print("chatter on stdout")
class SamplingParams:
    def __init__(self, temperature, max_tokens, repetition_penalty):
        assert temperature == 0.0
        self.n = max_tokens
class LLM:
    def __init__(self, model, dtype, gpu_memory_utilization, speculative_config=None):
        if model == "missing":
            raise ValueError("no such model")
        if model == "large":
            print("(worker) ERROR ValueError: out of memory", file=sys.stderr, flush=True)
            raise RuntimeError("see above")
        self.k = speculative_config["num_speculative_tokens"] if speculative_config else 0
    def generate(self, prompts, sampling, use_tqdm):
        print("more chatter")
        ids = [p["prompt_token_ids"] for p in prompts]
        if ids[0][0] == 99:
            sys.exit("died here")
        if ids[0][0] == 98:
            raise RuntimeError("bad prompt")
        class Out:
            pass
        outs = []
        for one in ids:
            inner, outer = Out(), Out()
            inner.token_ids = (one[0] + self.k,) * sampling.n
            outer.outputs = [inner]
            outs.append(outer)
        return outs
"""


class TestPeer:
    """The real runner, in a Python of its own, with a vLLM that only pretends."""

    @pytest.fixture
    def vllm(self, tmp_path, monkeypatch):
        (tmp_path / "vllm.py").write_text(VLLM)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        made: list[Peer] = []

        def start(text="vllm", model="m", draft=None, python=sys.executable):
            first = {"model": model, "draft": draft, "dtype": "float32"}
            (peer,) = named(text, {"vllm": python})
            peer.start = partial(peer.start, first)
            made.append(peer)
            return peer

        yield start
        for peer in made:
            peer.close()

    def test_it_generates(self, vllm):
        peer = vllm("vllm-draft(tokens=4)", draft="d")
        assert peer.start() is None
        assert peer.versions == {"vllm": "9.9"}
        assert (peer.name, peer.plain, peer.largest_batch) == ("vllm-draft(tokens=4)", "vllm", None)
        assert peer.arithmetic == "same"
        out = peer.generate([[1, 2], [5]], 3)
        assert out.tokens == [[5, 5, 5], [9, 9, 9]]
        assert 0 < out.seconds < 5

    def test_a_failure_of_one_prompt_is_told(self, vllm):
        peer = vllm()
        assert peer.start() is None
        with pytest.raises(PeerError, match="RuntimeError: bad prompt"):
            peer.generate([[98]], 3)
        assert peer.generate([[1]], 1).tokens == [[1]]
        with pytest.raises(PeerError, match="its process ended"):
            peer.generate([[99]], 3)

    def test_why_it_cannot_be_used(self, vllm, tmp_path, monkeypatch):
        assert "No such file" in vllm(python="/no/python").start()
        assert vllm(model="missing").start() == "ValueError: no such model"
        reason = "RuntimeError: see above (first: ValueError: out of memory)"
        assert vllm(model="large").start() == reason
        assert "needs a draft model" in vllm("vllm-draft").start()
        monkeypatch.setenv("PYTHONPATH", os.devnull)
        assert "No module named 'vllm'" in vllm().start()
        loud = tmp_path / "python"
        loud.write_text("#!/bin/sh\necho 'this is no Python' >&2; exit 3\n")
        loud.chmod(0o755)
        assert vllm(python=str(loud)).start() == "its process ended: this is no Python"
        loud.write_text("#!/bin/sh\necho hello; cat > /dev/null\n")
        assert vllm(python=str(loud)).start() == "it wrote 'hello\\n' in place of a JSON object"


class TestPeersByName:
    def words(self, text, **pythons):
        return [peer.words[2:] for peer in named(text, pythons)]

    def test_names_and_settings(self):
        assert self.words("transformers") == [("transformers",)]
        assert len(self.words("transformers-assisted")) == 4
        (one,) = self.words("transformers-assisted(schedule=constant,tokens=7)")
        assert one == ("transformers-assisted", 'schedule="constant"', "tokens=7")
        assert self.words("vllm-draft(3)") == [("vllm-draft", "tokens=3")]
        pythons = {"llama-cpp": "/a/python", "llama-cpp-draft": "/b/python"}
        for name, python in (("llama-cpp-draft", "/b/python"), ("llama-cpp-ngram", "/a/python")):
            (peer,) = named(name, pythons)
            assert peer.words[0] == python

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("transformer", "did you mean 'transformers'"),
            ("transformers(x=1)", "unknown setting of peer 'transformers'"),
            ("transformers-assisted(token=3)", "did you mean 'tokens'"),
            ("vllm-draft(5,0.3,6)", "takes at most 2 settings"),
        ],
    )
    def test_mistakes(self, text, words):
        with pytest.raises(SettingError, match=re.escape(words)):
            named(text, {})

    def test_a_file_is_run_as_its_users_run_it(self):
        name, how, given = run.settings(["llama-cpp-ngram", 'gguf="/models/a.gguf"'])
        assert how == {"rows": 1, "gguf": "/models/a.gguf"}
        assert run.shown(name, given) == "llama-cpp-ngram(gguf=a.gguf)"


class Reader(HTMLParser):
    """Elements that are not closed, ids, and everything that would be fetched."""

    VOID = frozenset({"meta", "br", "wbr", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.fetched, self.drawings = [], [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.look(tag, given)

    def handle_startendtag(self, tag, attrs):
        self.look(tag, dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def look(self, tag, given):
        self.ids += [given["id"]] if "id" in given else []
        links = [v for k, v in given.items() if k in ("src", "href", "xlink:href")]
        self.fetched += [v for v in links if not v.startswith("#")]
        if tag == "svg":
            self.drawings.append(given.get("aria-label"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    tasks = [task(f, i) for f in ("a", "b") for i in range(4)]
    methods = scripted(Scripted("<script>x(tokens=1)", 0.8), Scripted("p(tokens=2)", 0.7, "peer"))
    results = measured(folder, methods, groups(tasks, [1, 4])).document
    results["skipped"] = [{"name": "vllm", "reason": "no <Python>"}]
    share = {"mean": 0.8, "low": 0.7, "high": 0.9, "n": 4}
    results["shares"] = {"cost_ratio": 5.0, "prompts": 4, "cells": [
        {"family": f, "controller": "twice", "oracle": share, "informed": share,
         "best_fixed": share}
        for f in ("a", ALL)
    ]}  # fmt: skip
    return results, report.cells(results)


def drawn(results, cells) -> str:
    """The page's content, as the script in it makes it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's script")
    page_text = report.render(results, cells)
    data, script = re.findall(r"<script id[^>]*>(.*?)</script>", page_text, re.DOTALL)
    run = f"{script}\nprocess.stdout.write(render(JSON.parse({json.dumps(data)})));"
    done = subprocess.run([node, "-"], input=run, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


class TestPage:
    def test_it_is_whole_and_needs_nothing_else(self, made):
        content = drawn(*made)
        for text in (report.render(*made), content):
            reader = Reader()
            reader.feed(text)
            assert reader.open == []
            assert reader.fetched == []
            assert len(reader.ids) == len(set(reader.ids))
            assert "url(http" not in text
            assert "@import" not in text
        reader = Reader()
        reader.feed(content)
        assert len(reader.drawings) == 3 + 1 + 2 + 2 + 2  # families, dots, lengths, shares, batches
        assert all(reader.drawings)
        assert not re.search("NaN|undefined|Infinity", content)
        assert {"plain", "forerun", "peer"} >= set(re.findall(r'fill="var\(--(\w+)\)"', content))

    def test_names_are_escaped(self, made):
        assert report.render(*made).count("<script") == 3
        content = drawn(*made)
        assert "<script" not in content
        assert "no &#60;Python&#62;" in content

    def test_it_says_what_matters(self, made):
        text = re.sub(r"<[^>]+>", "", drawn(*made))
        assert "twice wrote 2.00 times as fast as plain decoding" in text
        assert "Against p(tokens=2) it was 1.40 times as fast" in text
        assert "vllm was not measured" in text
        assert "interrupted" not in text
        assert "some bars rest on 4 measurements only: read as rough" in text
        assert "Some figures rest on 1 measurement only" in text

    def test_an_interrupted_run_says_so(self, made):
        results, cells = made
        assert "This run was interrupted" in drawn({**results, "complete": False}, cells)

    def test_plain_alone(self):
        results = document(**{PLAIN: dict.fromkeys(KEYS, 1.0)})
        assert "Plain decoding only" in drawn(results, report.cells(results))


def test_results_are_json_without_surprises(tmp_path):
    measured(tmp_path, scripted(), groups([task("a", 0)], [1]))
    text = (tmp_path / bench.FILE).read_text()
    assert json.loads(text)["schema"] == bench.SCHEMA
    assert not list(tmp_path.glob(".*"))
