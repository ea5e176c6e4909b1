"""Drafting from counts: of the text itself, and of tables of what a target wrote before."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.controllers import CONTROLLERS
from forerun.drafters import Drafter, ngrams
from forerun.drafters.datastore import Datastore
from forerun.drafters.memory import GrowingTable, MemoryDraft, fingerprint, grown_file
from forerun.drafters.ngrams import NGrams, contexts_of, follow, pack, probability, unpack
from forerun.drafters.none import NullDrafter
from forerun.drafters.suffix import Occurrences, Suffix, SuffixDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.errors import ModelError, SettingError
from forerun.rules import RULES
from forerun.runtime import Rows
from forerun.runtime.drafts import write_tensors
from forerun.testing import ScriptedModel
from test_engine import V, chaotic

TEXTS = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=30), min_size=1, max_size=6)
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
SCRIPT = chaotic(3)


def written(drafter: Drafter, controller: str, prompt: list[int]) -> list[int]:
    engine = Engine(Rows(ScriptedModel(SCRIPT)), drafter)
    sampling = Sampling(max_new_tokens=25, ignore_eos=True)
    engine.submit(Request(prompt, sampling, CONTROLLERS.make(controller), RULES.make("standard")))
    return next(e.completion.tokens for e in engine.run() if e.completion)


# --- this text ------------------------------------------------------------------------------------


def test_the_longest_match_decides_and_then_the_count() -> None:
    seen = Occurrences()
    text = [1, 2, 3, 9, 2, 4, 9, 2, 4, 1, 2]
    seen.cover(text)
    token, sure = seen.follow(text, 8)  # type: ignore[misc]
    assert token == 3  # after 1 2, though 4 is more frequent after 2
    assert sure == pytest.approx(1 / (1 + 3 / 2**1.5))
    token, sure = seen.follow(text, 1)  # type: ignore[misc]
    assert token == 4
    token, sure = seen.follow([*text, 9, 2], 8)  # type: ignore[misc]
    assert token == 4
    assert sure == pytest.approx(2 / (2 + 3 / 2**1.5))
    assert seen.follow([*text, 7], 8) is None


def drafted(least: float, prompt: list[int], most: int) -> list[int]:
    """Lengths of the drafts of a text that goes round in threes."""
    model = ScriptedModel(lambda context: torch.eye(4)[context[-3] if len(context) > 2 else 1])
    engine = Engine(Rows(model), Suffix(least=least).build(None, None))
    rule, length = RULES.make("standard"), CONTROLLERS.make(f"fixed({most})")
    engine.submit(Request(prompt, Sampling(max_new_tokens=24), length, rule))
    done = next(e.completion for e in engine.run() if e.completion)
    assert done.tokens == prompt[:3] * 8
    return [round.drafted for round in done.rounds]


def test_a_draft_goes_on_through_periodic_text_and_ends_where_it_is_doubtful() -> None:
    assert 9 in drafted(0.05, [1, 2, 3], 9)
    assert max(drafted(0.5, [1, 2, 3], 9)[:3]) <= 1 < max(drafted(0.5, [1, 2, 3], 9))
    assert set(drafted(1.0, [1, 2, 3], 9)) == {0}


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 1.5}, {"least": 2}, {"least": "x"}])
def test_settings_of_suffix_and_memory(bad: dict[str, Any]) -> None:
    for spec in (Suffix, MemoryDraft):
        with pytest.raises(SettingError):
            spec(**bad)
    for wrong in ({"grow": 1}, {"table": ""}):
        with pytest.raises(SettingError, match="memory"):
            MemoryDraft(**wrong)


# --- tables ---------------------------------------------------------------------------------------


@given(TEXTS)
def test_a_table_is_built_from_exact_counts(texts: list[list[int]]) -> None:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for place in range(1, len(text)):
            for order in range(1, min(place, 4) + 1):
                counts[tuple(text[place - order : place])][text[place]] += 1
    table = NGrams.build([(text, 1) for text in texts], 10_000)
    for context, followers in counts.items():
        if (value := table.entries.get(contexts_of(context)[-1])) is not None:
            token, hits, misses = unpack(value)
            kept, others = followers[token], followers.total() - followers[token]
            assert kept == max(followers.values()) > 1
            scale = max(kept / 31, others / 31, 1)
            assert abs(hits - kept / scale) < 1
            assert abs(misses - others / scale) < 1
    frequent = [c for c, f in counts.items() if len(c) == 1 and f.total() == max(f.values()) > 1]
    assert all(contexts_of(context)[-1] in table.entries for context in frequent)
    assert len(NGrams.build([(text, 1) for text in texts], 2)) <= 2


def test_a_prompt_is_context_and_nothing_more() -> None:
    built = NGrams.build([([7, 8, 5, 6], 2)] * 3, 100)
    grown = NGrams()
    grown.learn([7, 8, 5, 6], 2)
    for table in (built, grown):
        assert follow([table], [8]).token == 5  # type: ignore[union-attr]
        assert follow([table], [7]) is None


def test_the_longest_context_speaks_and_counts_of_tables_add_up() -> None:
    one, other = NGrams(), NGrams()
    one.entries = {contexts_of([2])[0]: pack(5, 9, 0), contexts_of([1, 2])[1]: pack(6, 2, 1)}
    assert follow([one], [1, 2]) == (6, probability(2, 2, 1))
    assert follow([one], [3, 2]) == (5, probability(1, 9, 0))
    other.entries = {contexts_of([1, 2])[1]: pack(7, 4, 0)}
    assert follow([one, other], [1, 2]) == (7, probability(2, 4, 3))
    assert follow([], [1]) is None


def test_counts_stay_within_an_entry_and_a_token_that_stops_coming_leaves() -> None:
    table = NGrams()
    table.learn([1, 2] * 200, 0)
    assert all(max(unpack(value)[1:]) <= 31 for value in table.entries.values())
    table.learn([1, 3] * 60, 0)
    assert follow([table], [1]).token == 3  # type: ignore[union-attr]
    table.learn([1 << 18, 5, 1 << 18], 0)  # an id that no entry can hold
    assert follow([table], [5]) is None


def test_of_a_full_table_the_rarest_and_oldest_leave() -> None:
    table = NGrams({i: pack(i, 1 + 20 * (i < 10), 0) for i in range(100)})
    table.trim(100)
    assert len(table) == 100
    table.trim(80)
    assert len(table) == 60
    assert set(range(10)) < set(table.entries)  # frequent, if old
    assert set(range(50, 100)) < set(table.entries)  # newest


def test_a_file_holds_what_was_saved_and_nothing_else_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    table = NGrams.build([([1, 2, 3, 1, 2, 3], 0), ([1, 2, 4], 0)], 100)
    table.save(path, "of a tokenizer", {"texts": "2"})
    assert NGrams.load(path, "of a tokenizer").entries == table.entries
    assert path.stat().st_size < 8 * len(table) + 300
    assert list(tmp_path.iterdir()) == [path]
    fewer = NGrams.load(path, vocab_size=3)
    assert {unpack(value)[0] for value in fewer.entries.values()} == {2}
    with pytest.raises(ModelError, match="another tokenizer"):
        NGrams.load(path, "of another")
    path.write_text("x")
    with pytest.raises(ModelError, match="is no table of n-grams"):
        NGrams.load(path)
    with pytest.raises(ModelError, match="build-memory"):
        MemoryDraft(table="nowhere").build(Rows(ScriptedModel(SCRIPT)), None)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
    st.dictionaries(st.lists(st.integers(0, V - 1), min_size=1, max_size=4).map(tuple),
                    st.tuples(st.integers(0, V - 1), st.integers(0, 31), st.integers(0, 31))),
    st.sampled_from(["fixed(4)", "auto", "hf-threshold"]),
)  # fmt: skip
def test_whatever_a_table_holds_the_text_is_the_targets_own(
    prompt: list[int],
    held: dict[tuple[int, ...], tuple[int, int, int]],
    controller: str,
) -> None:
    table = NGrams({contexts_of(context)[-1]: pack(*value) for context, value in held.items()})
    drafter = SuffixDrafter(16, 0.0, [table])
    assert written(drafter, controller, prompt) == written(NullDrafter(), "fixed(0)", prompt)


# --- a table that grows ---------------------------------------------------------------------------


def test_a_full_disk_costs_nothing_but_the_table(tmp_path: Path) -> None:
    """Also at the end of a process, where an error would be a traceback below the text."""
    resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")
    growing = GrowingTable(tmp_path / "table.safetensors", "of a tokenizer", V)
    growing.learn([1, 2, 3, 4], 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="large"):
            growing.table.save(tmp_path / "other", "of a tokenizer")
        with pytest.raises(OSError, match="large"):
            Datastore.build([[1, 2, 3]]).save(tmp_path / "store")
        with pytest.raises(OSError, match="large"):
            write_tensors(tmp_path / "draft", {"weight": torch.zeros(9)})
        growing.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name for file in tmp_path.iterdir()} == {"store", "table.lock"}
    assert follow([growing.table], [1, 2]).token == 3  # type: ignore[union-attr]


def test_what_was_written_once_is_drafted_in_the_next_process() -> None:
    target = Rows(ScriptedModel(SCRIPT))
    first = MemoryDraft(grow=True, n=1, least=0).build(target, TOKENIZER)
    text = written(first, "fixed(4)", [1, 2])
    path = grown_file("", fingerprint(TOKENIZER))
    assert not path.exists()
    del first  # as at the end of a process
    table = NGrams.load(path)
    assert follow([table], [1, 2]).token == text[0]  # type: ignore[union-attr]
    assert list(path.parent.glob("*.safetensors")) == [path]
    still = MemoryDraft(grow=False).build(target, TOKENIZER)
    assert written(still, "fixed(4)", [4, 4])
    assert NGrams.load(path).entries == table.entries


def test_processes_add_up_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.safetensors"
    code = (
        "import sys; from pathlib import Path; from forerun.drafters.memory import GrowingTable\n"
        "for i in range(20):\n"
        "    table = GrowingTable(Path(sys.argv[1]), 'x', 99)\n"
        "    table.learn([int(sys.argv[2]), 7], 1)\n"
        "    table.save()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path), "1"])
    while not path.exists() and other.poll() is None:  # it imports for seconds
        time.sleep(0.001)
    for _ in range(20):
        table = GrowingTable(path, "x", 99)
        table.learn([2, 7], 1)
        table.save()
    assert other.wait(timeout=120) == 0
    table = NGrams.load(path, "x")
    assert sorted(unpack(value) for value in table.entries.values()) == [(7, 20, 0)] * 2


def test_a_file_that_cannot_be_used_costs_nothing_but_speed(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    path.write_text("no table")
    growing = GrowingTable(path, "x", 999, most=50)
    growing.learn([1, 2, 3], 1)
    growing.save()
    assert len(NGrams.load(path, "x")) == 2
    rng = np.random.default_rng(0)
    growing.learn(rng.integers(0, 999, 5000).tolist(), 0)  # written without being asked
    assert 0 < len(NGrams.load(path, "x")) <= 50
    nowhere = GrowingTable(path / "a file is no folder" / "x", "x", 999, most=50)
    nowhere.learn(rng.integers(0, 999, 5000).tolist(), 0)
    assert 0 < len(nowhere.table) <= 50
    nowhere.learn([1, 2], 0)
    nowhere.save()
    assert follow([nowhere.table], [1]).token == 2  # type: ignore[union-attr]


def test_the_layout_of_an_entry_is_64_bits() -> None:
    assert 36 + ngrams.VALUE_BITS == 64
    assert max(contexts_of([2**18 - 1] * 9)) < 2**36
    assert unpack(pack(2**18 - 1, 31, 31)) == (2**18 - 1, 31, 31)
