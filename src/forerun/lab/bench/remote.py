"""A peer that lives in a Python of its own, spoken to over a pipe."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from forerun.errors import ForerunError
from forerun.lab.bench.peers import Peer, PeerOutput

RUNNER = Path(__file__).with_name("peer_runner.py")
START = 600.0
"""Seconds a peer may take to load its models."""
CAUSE = re.compile(r"\b\w+Error: .*")
ANSWER = 600.0
"""Seconds a peer may take for one prompt."""


Prepare = Callable[[dict[str, Any], Path], dict[str, Any]]


class PeerError(ForerunError):
    """The peer's process ended, went silent or said it failed."""


class Remote(Peer):
    """A peer in its own environment; see `peer_runner` for the protocol.

    Args:
        name: in the results.
        python: the interpreter of that environment; None if the user gave none.
        first: the first line of the protocol: which models, how.
        runner: the script it runs.
        prepare: called with `first` and a folder that lives as long as the peer; what it returns
            replaces entries of `first`.
    """

    def __init__(
        self,
        name: str,
        python: str | None,
        first: dict[str, Any],
        runner: Path = RUNNER,
        prepare: Prepare | None = None,
    ) -> None:
        self.name, self.python, self.first, self.runner = name, python, first, runner
        self._prepare = prepare
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[str] | None = None

    def available(self) -> str | None:
        """Start it and load its models; why it cannot be used, or None if it can."""
        if self.python is None:
            return f"no Python named for it (--peer-python {self.name.partition('(')[0]}=PATH)"
        if not Path(self.python).is_file():
            return f"there is no Python at {self.python}"
        try:
            if self._prepare is not None:
                self._folder = tempfile.TemporaryDirectory()
                made = self._prepare(self.first, Path(self._folder.name))
                self.first = {**self.first, **made}
            self._start()
            self.versions = self._ask(self.first, START).get("versions", {})
        except (ForerunError, ImportError, OSError) as error:
            self.close()
            return str(error)
        return None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> PeerOutput:
        """Continue prompts greedily, decoded together; the seconds are measured over there.

        Raises:
            PeerError: it failed.
        """
        request = {
            "prompts": [list(p) for p in prompts],
            "max_new_tokens": max_new_tokens,
            "repetition_penalty": repetition_penalty,
        }
        answer = self._ask(request, ANSWER)
        try:
            return PeerOutput(
                [list(map(int, t)) for t in answer["tokens"]], float(answer["seconds"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"it answered {str(answer)[:100]}") from error

    def close(self) -> None:
        """End the process."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(OSError):  # what was not yet sent cannot be
                if pipe is not None:
                    pipe.close()
        self._process = None

    def _start(self) -> None:
        assert self.python is not None
        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115 - closed with the process
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [self.python, "-c", self.runner.read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, pipe: Any) -> None:
        try:
            for line in pipe:
                self._lines.put(line)
        except ValueError:  # closed meanwhile
            pass
        self._lines.put(None)

    def _ask(self, value: dict[str, Any], patience: float) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise PeerError("it is not running")
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=patience)
        except queue.Empty as error:
            raise PeerError(f"no answer within {patience:g} s") from error
        except OSError:
            line = None
        if line is None:
            raise PeerError(f"its process ended: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerError(f"it said {line[:100]!r}") from error
        if "error" in answer:
            message = str(answer["error"])[:300]
            # Its own processes may have failed first, and it only says "see above".
            causes = [match.group() for s in self._words() if (match := CAUSE.search(s))]
            if causes and causes[0] not in message:
                message += f" (first: {causes[0][:300]})"
            raise PeerError(message)
        return dict(answer)

    def _words(self) -> list[str]:
        assert self._stderr is not None
        self._stderr.seek(0)
        return [s for s in self._stderr.read().splitlines() if s.strip()]

    def _last_words(self) -> str:
        return (self._words() or ["it said nothing"])[-1][:300]
