"""Command lines nobody thought of: an exit code, one line of error, and no traceback.

`FORERUN_FUZZ=10000 python -m pytest tests/cli/test_fuzz.py` tries that many (CI: 150).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from forerun.cli import app, main
from forerun.lab.traces import measuring

EXAMPLES = int(os.environ.get("FORERUN_FUZZ", "150"))
LEFT_OUT = ("demo", "serve")
"""Commands that take minutes, download or listen: only their options are read."""
OFTEN = {"generate": 8, "record": 2, "replay": 3, "tune": 2, "costs": 2, "audit": 2}
"""Chances against 1 of the others."""


def _commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if "-o" in {opt for p in command.params for opt in p.opts}:  # it does something itself
                yield (*path, name), command
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(get_command(app)))

NUMBERS = ["-1", "0", "1", "2", "3", "7", "0.5", "1.5", "-0.1", "1e-9", "1e9", "nan", "inf", "-inf"]
SPECS = [
    "auto", "none", "lookup", "lookup(n=3)", "specbound", "fixed", "fixed(3)", "fixed(-1)",
    "fixed(", "gammatune(eta=0.5)", "gammatune(eta=2)", "hf-threshold", "bounded(svip,high=3)",
    "bandit", "cm-asd", "cm-asd(two_pass=true)", "standard", "exact", "block", "ears(beta=0.2)",
    "budget(fly)", "typical", "standart", "fixed;svip", "standard;ears(beta=0.3)",
    "budget(ears(beta=0.3), drift=0.01)",
]  # fmt: skip
WORDS = [
    "", " ", "-", "--", "all", "x", "Hello", "é", "日本語", "\x00", "\ud800", "a\nb", "%s{0}",
    "a" * 300, "val", "test", "builtin", "builtin:chat", "builtin:nosuch", "stories,chat", "1,2",
    "1,,2", "2,1,x", "5=1", "5=-inf", "999=1", "5", "c=10", "c=10,slope=0.02", "c=0", "c=nan",
    "c=1,c=2", "slope=1", "cpu", "cuda:99", "warp", "float32", "float7", "vllm:OUT", "vlm:x",
    "transformers", "transformers(x=1)", "vllm=/no/python", "light", "full", "hard", "distill",
]  # fmt: skip
FILES = [
    "TARGET", "DRAFT", "PROMPTS", "FAMILIES", "BAD", "EMPTY", "BINARY", "FOLDER", "NOWHERE",
    "NOFOLDER", "TRACE", "COSTS", "SETTINGS", "OUT",
]  # fmt: skip

VALUE = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(SPECS),
    st.sampled_from(WORDS),
    st.sampled_from(FILES),
    st.text(max_size=8),
)
LIKELY = {
    "N": NUMBERS[1:6], "B": NUMBERS[1:5], "S": NUMBERS[1:5], "K": NUMBERS[1:5], "T": NUMBERS[1:8],
    "X": NUMBERS[1:8], "P": NUMBERS[1:7], "SPEC": SPECS, "SPEC;SPEC...": SPECS, "D": ["cpu"],
    "FILE": ["PROMPTS", "FAMILIES", "SETTINGS", "OUT"], "DIR": ["OUT", "FOLDER"], "CSV": ["OUT"],
    "TRACE": ["TRACE", "OUT"], "COSTS": ["COSTS", "OUT"],
    "FILE|builtin:FAMILY": ["PROMPTS", "FAMILIES"],
    "FILE|c=10,slope=0.02": ["COSTS", "c=10", "c=5,slope=0.1"],
    "ID_OR_PATH": ["TARGET", "DRAFT"],
    "ID_OR_PATH|SPEC": [
        "TARGET", "DRAFT", "none", "lookup", "specbound", "adadecode", "kangaroo",
    ],
    "NAME": ["a", "auto", "cm-asd"],
}  # fmt: skip


@st.composite
def lines(draw):
    """A command with options of its own, mostly with values they may have."""
    names = [path for path in COMMANDS if " ".join(path) not in LEFT_OUT]
    path = draw(st.sampled_from([p for p in names for _ in range(OFTEN.get(p[0], 1))]))
    words = []
    params = [p for p in COMMANDS[path].params if p.name != "help"]
    for param in params:
        likely = st.sampled_from(LIKELY.get(param.metavar, NUMBERS[1:5]))
        value = st.one_of(likely, likely, likely, VALUE)
        if param.param_type_name == "argument":
            words += draw(st.lists(value, min_size=1 if draw(st.integers(0, 9)) else 0, max_size=1))
        elif draw(st.integers(0, 9)) < (8 if param.required else 1):
            words += [param.opts[0]] if param.is_flag else [param.opts[0], draw(value)]
    if draw(st.integers(0, 19)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(VALUE))
    return [*path], words


@pytest.fixture(scope="module")
def files(pair, tmp_path_factory):
    """What the names of `FILES` stand for."""
    from forerun.lab.traces.costs import Cell, CostTable
    from made_traces import periodic

    folder = tmp_path_factory.mktemp("fuzz")
    paths = {name: folder / name.lower() for name in FILES}
    paths |= {"TARGET": Path(pair.target), "DRAFT": Path(pair.draft)}
    paths["PROMPTS"].write_text('"Hello"\n{"prompt": "Good day", "id": 3, "meta": [1]}\n')
    paths["FAMILIES"].write_text(
        "".join(json.dumps({"tokens": [i + 5], "family": "ab"[i % 2]}) + "\n" for i in range(4))
    )
    paths["BAD"].write_text('"fine"\n{"prompt": ""}\n')
    paths["EMPTY"].write_text("")
    paths["BINARY"].write_bytes(bytes(range(256)))
    paths["FOLDER"].mkdir()
    paths["NOFOLDER"] = folder / "none" / "file"
    periodic(2).write(paths["TRACE"])
    CostTable((Cell.synthetic(8),)).write(paths["COSTS"])
    paths["SETTINGS"].write_text('{"schema": 1, "controller": "fixed(2)"}')
    return paths


SMALL = {
    "--max-new-tokens": "3", "--device": "cpu", "--limit": "1", "--budget": "2", "--repeats": "1",
    "--widths": "1,2", "--tokens": "40", "--epochs": "1", "--confirm": "1", "--width": "2",
    "--target": "TARGET", "--draft": "DRAFT", "--context": "4", "--data": "PROMPTS",
    "--layers": "1",
}  # fmt: skip
"""What keeps a command short unless the case says otherwise: the last of equal options counts."""


def small(path, params):
    """Those of `SMALL` that a command has, and prompts."""
    bench = {"--prompt-file": "PROMPTS", "--prompts": "1", "--controllers": "fixed(2)"}
    given = SMALL | (bench if path == ["bench"] else {"--prompts": "PROMPTS"})
    own = {opt for p in params for opt in p.opts}
    return [word for opt, value in given.items() if opt in own for word in (opt, value)]


def run(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FORERUN_FUZZ" not in os.environ,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(line=lines())
def test_any_command_line_ends_in_words(line, files):
    path, words = line
    known = {name: str(where) for name, where in files.items()}
    words = [*small(path, COMMANDS[tuple(path)].params), *words]
    argv = [*path, *(known.get(w, w.replace("OUT", known["OUT"])) for w in words)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for name, few in (("LIVE_TURNS", 2), ("LIVE_TOKENS", 6), ("WARM", 1), ("LIVE", (0, 1, 2))):
            patch.setattr(measuring, name, few, raising=False)
        patch.setattr("sys.stdin", io.StringIO('"Hello"\n'))
        patch.chdir(files["FOLDER"])
        code, out, err = run(argv)
    for name in ("OUT", "NOWHERE"):
        where = files[name]
        shutil.rmtree(where) if where.is_dir() else where.unlink(missing_ok=True)
    assert code in (0, 1, 2), (argv, err)
    assert "Traceback" not in err, (argv, err)
    errors = [text for text in err.splitlines() if text.startswith("error: ")]
    bugs = path == ["audit"] and code == 1 and not errors  # its figures say why
    assert len(errors) == (code != 0) - bugs, (argv, err)
    assert not any(re.match(r"error: unexpected \w+: ", text) for text in errors), (argv, err)
    if code == 0 and "--json" in argv and "--help" not in argv:
        json.loads(out)
