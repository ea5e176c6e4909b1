"""Real processes: what only shows with real pipes, terminals and signals."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.cli.shared.guard import HELD
from forerun.cli.shared.report import claim

COMMAND = [sys.executable, "-m", "forerun"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {
    "TERM": "xterm-256color",
    "OMP_NUM_THREADS": "1",
}


def on_terminal(argv: list[str]) -> tuple[int, str]:
    """Run in this process on a pseudo-terminal; exit code and everything shown."""
    near, far = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(near, 65536):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, open(far, "w", encoding="utf-8") as terminal:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        code = main(argv)
    reader.join()
    os.close(near)
    return code, b"".join(shown).decode()


def test_help_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from forerun.cli import main\n"
        "for argv in (['--help'], ['generate', '--help'], ['list', 'controllers'], "
        "['--version']):\n"
        "    assert main(argv) == 0\n"
        "heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_terminal_shows_colours_and_prompt(pair):
    options = [*pair.options, "--max-new-tokens", "12", "--controller", "fixed(2)"]
    code, shown = on_terminal(["generate", "[b]Hi[/b]", *options])
    assert code == 0
    assert "[b]Hi[/b]" in shown
    assert "drafted and accepted" in shown
    assert "\x1b[1;33m" in shown, "a correction is bold yellow"
    assert "12 tokens in" in shown


@pytest.mark.slow
def test_lists_fit_a_narrow_terminal():
    code, shown = on_terminal(["list"])
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")
    assert "forerun info NAME shows a part's settings" in plain
    assert "length=" not in plain
    assert re.search(r"^gammatune\+ +gammatune, and stop", plain, re.MULTILINE)
    assert re.search(r"^ears +lossy +standard, with", plain, re.MULTILINE)


def test_broken_pipe_is_silent():
    process = subprocess.Popen(
        [*COMMAND, "list", "controllers"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() != 0
    assert "Traceback" not in errors
    assert "error" not in errors.lower()


def test_interrupt_ends_without_a_traceback():
    code = (
        "import os, signal, sys\n"
        "from forerun.cli.shared import guard\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "def command():\n"
        "    print('written')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "sys.exit(guard.guarded(command))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "written\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="by a function of glibc")
def test_what_is_left_running_does_not_abort_an_interrupted_process():
    """As threads of C++ do while the interpreter ends."""
    code = (
        "import atexit, ctypes, sys\n"
        "import forerun.cli as cli\n"
        "def command(**_):\n"
        "    print('written')\n"
        "    raise KeyboardInterrupt\n"
        "cli.commands = lambda: command\n"
        "ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).abort, None, None)\n"
        "atexit.register(print, 'saved')\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "written\nsaved\n", "")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_loses_no_line(pair, tmp_path, number):
    path = tmp_path / "many.jsonl"
    path.write_text('"Hello"\n' * 2_000)
    process = subprocess.Popen(
        [*COMMAND, "generate", *pair.options, "--draft", "none", "--prompt-file", str(path),
         "--max-new-tokens", "3", "--jsonl"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(number)
    rest, errors = process.stdout.read(), process.stderr.read()
    assert process.wait() == 128 + number
    process.stdout.close()
    process.stderr.close()
    done = [json.loads(line)["index"] for line in [first, *rest.splitlines()]]
    assert sorted(done) == list(range(len(done)))
    assert errors == f"interrupted; {len(done):,} of 2,000 prompts are complete\n"


SIGNAL = """
import gc, os, signal, sys
from forerun import load
for _ in range(2):  # the plug-in of an earlier model must not take the stack of signals with it
    model = load(sys.argv[1], sys.argv[2], runtime="openvino", device="cpu")
    assert model.generate("Good day", max_new_tokens=4).tokens
    del model
    gc.collect()
signal.signal(signal.SIGINT, lambda *_: print("caught", flush=True))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_a_signal_after_models_are_gone(pair, tmp_path):
    pytest.importorskip("openvino")
    argv = [sys.executable, "-c", SIGNAL, pair.target, pair.draft]
    env = os.environ | {"FORERUN_CACHE": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stdout) == (0, "caught\n"), done.stderr


@pytest.mark.parametrize(
    "command", ["record", "costs", "bench", "tune", "generate", "write", "train-draft"]
)
def test_an_output_has_one_writer(command, forerun, tmp_path):
    pytest.importorskip("fcntl")
    output = tmp_path / "out"
    argv = {
        "record": ["--prompts", "builtin:stories", "-o"],
        "costs": ["-o"],
        "bench": ["-o"],
        "generate": ["Hello", "--jsonl", "-o"],
        "write": ["--prompts", "builtin:stories", "-o"],
        "train-draft": ["eagle", "--data", "builtin", "-o"],
        "tune": [str(tmp_path / "trace.parquet"), "--costs", "c=20", "-o"],
    }[command]
    with HELD:
        claim(str(output))
        second = forerun(command, *argv, str(output))
    assert second.code == 2
    assert f"process {os.getpid()} writes {output}" in second.err
    assert not output.exists()


def test_a_full_disk_is_said_with_the_file_and_leaves_what_was_there(
    forerun, tmp_path, monkeypatch
):
    output = tmp_path / "costs.json"
    output.write_text("old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        early = forerun("costs", "--ratio", "20", "-o", str(output))
    monkeypatch.setattr(Path, "write_text", full)
    late = forerun("costs", "--ratio", "20", "-o", str(output))
    for done in (early, late):
        assert (done.code, done.error) == (1, f"error: No space left on device ({output})")
    assert output.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [output]
