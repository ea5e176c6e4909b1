"""Traces in memory and on disk."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import MissingExtraError, SettingError
from forerun.lab.traces import trace as lab
from forerun.lab.traces.trace import JUDGED, KEY, SIGNALS, Trace, concatenate
from made_traces import trace_of

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")
pq = pytest.importorskip("pyarrow.parquet")


def make(sizes=(3, 1, 5), depth=4, seed=0, room=0):
    """A trace of random numbers, padded to the longest text and `room` more."""
    random, sizes = np.random.default_rng(seed), np.array(sizes)
    prompts, longest = len(sizes), max(sizes) + room
    inside = np.arange(longest) < sizes[:, None]

    def whole(*shape):
        values = random.integers(0, 1 << 31, (prompts, longest, *shape))
        return values * inside.reshape(inside.shape + (1,) * len(shape))

    def real(*shape):
        values = random.random((prompts, longest, *shape)).astype(np.float32).astype(np.float64)
        values[random.random(values.shape) < 0.1] = np.inf  # a margin may be
        return np.where(inside.reshape(inside.shape + (1,) * len(shape)), values, 0.0)

    return Trace(
        families=tuple(random.choice(["stories", "chat ✓", ""], prompts).tolist()),
        ids=tuple(f"id-{i}" for i in range(prompts)),
        sizes=sizes,
        budgets=sizes + random.integers(0, 9, prompts),
        prompt_tokens=random.integers(1, 99, prompts),
        tokens=whole(),
        draft_tokens=whole(depth),
        matches=whole(),
        ends=whole(),
        accept_prob=real(depth),
        signals={name: real(depth) for name in SIGNALS},
        lengths=whole(),
        stops=whole(),
        judged={name: real(depth) for name in JUDGED},
        about={"target": {"name": "mine"}, "depth": depth},
    )


def same(a, b):
    for f in fields(Trace):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if f.name in ("signals", "judged"):
            assert one.keys() == other.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
                assert other[name].dtype == np.float64
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        else:
            assert one == other


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 1 << 30)
)
def test_a_file_gives_back_every_bit(tmp_path_factory, sizes, depth, seed):
    path = tmp_path_factory.getbasetemp() / "trace.parquet"
    trace = make(sizes, depth, seed)
    trace.write(path)
    same(trace, Trace.read(path))
    assert [p.name for p in path.parent.glob(".trace*")] == []


def test_padding_beyond_the_longest_text_is_not_kept(tmp_path):
    make(room=3).write(tmp_path / "t")
    again = Trace.read(tmp_path / "t")
    assert again.tokens.shape == (3, 5)
    np.testing.assert_array_equal(again.draft_tokens, make(room=3).draft_tokens[:, :5])


def test_the_file_is_as_documented(tmp_path):
    trace = make()
    trace.write(tmp_path / "t")
    table = pq.read_table(tmp_path / "t")
    assert len(table) == 9  # a row per committed position
    assert table["position"].to_pylist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert table.schema.field("entropy").type == pa.list_(pa.float32(), 4)
    assert json.loads(table.schema.metadata[KEY]) == {"schema": 2, "about": trace.about}
    meta = pq.ParquetFile(tmp_path / "t").metadata.row_group(0)
    assert {meta.column(i).compression for i in range(meta.num_columns)} == {"ZSTD"}
    page = (lab.Path(__file__).parents[1] / "docs" / "trace.md").read_text(encoding="utf-8")
    for name in table.column_names:
        assert f"`{name}`" in page, f"docs/trace.md must describe {name}"


def test_views():
    trace = make()
    assert (trace.prompts, trace.depth) == (3, 4)
    assert trace.valid.sum(1).tolist() == [3, 1, 5]


@pytest.mark.parametrize("index", [[2, 0], np.array([2, 0]), np.array([True, False, True])])
def test_take(index):
    trace, order = make(), [2, 0] if np.asarray(index).dtype != bool else [0, 2]
    taken = trace.take(index)
    assert taken.ids == tuple(f"id-{i}" for i in order)
    assert taken.families == tuple(trace.families[i] for i in order)
    np.testing.assert_array_equal(taken.draft_tokens, trace.draft_tokens[order])
    np.testing.assert_array_equal(taken.signals["top1"], trace.signals["top1"][order])
    assert trace.take([]).prompts == 0


def test_parts_put_together_are_the_whole(tmp_path):
    trace = make((3, 1, 5, 2))
    parts = [trace.take([0]), trace.take([1, 2]), trace.take([3])]
    for i, part in enumerate(parts):  # each as long as its own longest text
        part.write(tmp_path / str(i))
    same(trace, concatenate([Trace.read(tmp_path / str(i)) for i in range(3)]))
    with pytest.raises(SettingError, match=r"different depths .*\[3, 4\]"):
        concatenate([make(depth=4), make(depth=3)])
    with pytest.raises(SettingError, match="no traces"):
        concatenate([])


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "t"
    make().write(path)
    before = path.read_bytes()

    def full(table, where, **options):
        lab.Path(where).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        make(seed=1).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def damage(path, change):
    """Write a good trace's table after a change."""
    make().write(path)
    table = pq.read_table(path)
    pq.write_table(change(table), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["entropy"]), "column 'entropy' is missing"),
        (lambda t: t.replace_schema_metadata({}), "is not a trace; make one with forerun record"),
        (lambda t: t.replace_schema_metadata({KEY: b"{"}), "provenance cannot be read"),
        (lambda t: t.replace_schema_metadata({KEY: b"[]"}), "provenance cannot be read"),
        (
            lambda t: t.replace_schema_metadata({KEY: b'{"schema": 3, "about": {}}'}),
            "has trace schema 3 and this forerun reads 1 to 2",
        ),
        (lambda t: t.slice(1), "positions are not in order"),
        (lambda t: t.slice(0, 0), "positions are not in order"),
        (lambda t: t.take(pa.array([0, 2, 1, 3, 4, 5, 6, 7, 8])), "positions are not in order"),
        (lambda t: pa.concat_tables([t, t]), "positions are not in order"),
        (lambda t: change_column(t, "token", pa.nulls(9, pa.int32())), "'token' has gaps"),
        (
            lambda t: change_column(t, "entropy", runs(3)),
            r"'entropy' is of type fixed_size_list.*3\], not fixed_size_list.*4\]",
        ),
        (
            lambda t: change_column(t, "entropy", pa.array([1.0] * 9)),
            "'entropy' is of type double, not fixed_size_list",
        ),
        (lambda t: t.drop_columns(["draft_tokens"]), "column 'draft_tokens' is missing"),
        (lambda t: change_column(t, "draft_tokens", pa.array([1] * 9)), "of type int64, not fixed"),
        (
            lambda t: change_column(t, "token", pa.array(["a"] * 9)),
            "'token' is of type string, not int32",
        ),
    ],
)
def test_damaged_files_say_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "t.parquet"
    damage(path, change)
    with pytest.raises(SettingError, match=message) as caught:
        Trace.read(path)
    assert str(path) in str(caught.value)


def change_column(table, name, values):
    at = table.column_names.index(name)
    return table.set_column(at, name, values)


def runs(depth):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(9 * depth, np.float32)), depth)


def test_files_that_are_no_parquet(tmp_path):
    path = tmp_path / "t"
    for content in (b"", b"hello", None, None):
        if content is None:
            make().write(path)
            whole = path.read_bytes()
            content = whole[: len(whole) // 2] + whole[-200:]
        path.write_bytes(content)
        with pytest.raises(SettingError, match="is not a readable Parquet file"):
            Trace.read(path)
    with pytest.raises(FileNotFoundError):
        Trace.read(tmp_path / "none")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 20), st.integers(1, 255))
def test_a_flipped_byte_is_an_error_or_a_trace(tmp_path_factory, place, change):
    """Never anything but `SettingError`; only the provenance carries no checksum."""
    path = tmp_path_factory.getbasetemp() / "flipped.parquet"
    make().write(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= change
    path.write_bytes(bytes(data))
    with contextlib.suppress(SettingError):
        Trace.read(path)


def test_pyarrow_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forerun\[lab\]'"):
        make().write(tmp_path / "t")
    with pytest.raises(MissingExtraError, match="pyarrow is not installed"):
        lab.pyarrow_modules()


def test_traces_need_neither_torch_nor_pyarrow():
    code = (
        "import sys, forerun.lab.traces.trace\n"
        "print([n for n in ('torch', 'transformers', 'pyarrow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_schema_1_is_read_as_far_as_it_says(tmp_path):
    trace = trace_of(np.random.default_rng(0).random((3, 9)) < 0.6, 4)
    trace.write(tmp_path / "t")
    table = pq.read_table(tmp_path / "t")
    own = {"target_top1": 0.25, "target_entropy": 2.0, "top5_overlap": 0.5}
    older = table.drop_columns([*JUDGED, "length", "stopped_by"])
    for name, value in own.items():
        older = older.append_column(name, pa.array([value] * len(table), pa.float32()))
    head = json.dumps({"schema": 1, "about": {}}).encode()
    pq.write_table(older.replace_schema_metadata({KEY: head}), tmp_path / "t")
    read = Trace.read(tmp_path / "t")
    for name in ("draft_tokens", "matches", "accept_prob", "lengths", "stops"):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))
    place = np.arange(9)[:, None] + np.arange(4)
    known = (np.arange(4) <= trace.matches[..., None]) & (place < 9)
    for name in JUDGED:
        np.testing.assert_array_equal(
            np.isfinite(read.judged[name]), known & (name in {*own, "ratio"})
        )
    np.testing.assert_array_equal(read.judged["ratio"][known], trace.judged["ratio"][known])
    assert set(read.judged["target_top1"][known]) == {0.25}


def test_about_is_kept_by_parts():
    assert make().take([0]).about == concatenate([make(), replace(make(), about={})]).about


@pytest.mark.parametrize("pair", ["bytes", "captions", "code"])
def test_a_trace_takes_at_most_twice_the_bytes_of_schema_1(pair, tmp_path):
    """Which had of what rules read the first drafted token's only."""
    now = pq.read_table(lab.Path(__file__).parent / "data" / f"pair-{pair}.parquet")
    older = now.drop_columns([*JUDGED, "length", "stopped_by"])
    for name in ("target_top1", "target_entropy", "top5_overlap"):
        older = older.append_column(name, pc.list_element(now[name], 0))
    sizes = []
    for table in (older, now):
        pq.write_table(table, tmp_path / "t", compression="zstd")
        sizes.append((tmp_path / "t").stat().st_size)
    assert sizes[0] < sizes[1] < 2 * sizes[0]
