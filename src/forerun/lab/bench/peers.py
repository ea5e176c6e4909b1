"""Other implementations behind a pipe, for `bench` and `audit`: any command that speaks JSON lines.

In, first: the object of `opening`. Out: `{"ready": true}` or `{"error": "..."}`; beside "ready" may
stand "name"; "plain", the name of the peer that decodes plainly what this one speculates on;
"rows", the most texts it decodes together (1; null: any); "versions" of its libraries;
"arithmetic", "own" where weights or cache are not the target's ("same"). Then per request in:
`{"prompts", "max_new_tokens", "repetition_penalty"}`, out: `{"tokens", "seconds"}`, greedy and
without the prompts, an end of text included, or `{"error"}`. Seconds are the peer's, so the pipe
costs nothing.
"""

from __future__ import annotations

import json
import queue
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from forerun.errors import ForerunError, SettingError

if TYPE_CHECKING:
    from forerun.model import Model
    from forerun.prompts import Prompt

START = 600.0  # seconds a peer may take to load its models
ANSWER = 600.0  # seconds a peer may take for one request
CAUSE = re.compile(r"\b\w+Error: .*")

Kind = Literal["plain", "forerun", "peer"]  # of a method


@dataclass(frozen=True)
class Run:
    """One timed run of one method on one group; lists are per prompt."""

    seconds: float  # wall time of the whole group, prefill included
    tokens: list[list[int]]  # output token ids
    ttft: list[float] | None = None  # seconds to the first token; None if the method cannot tell
    rounds: list[int] | None = None
    drafted: list[int] | None = None
    accepted: list[int] | None = None
    lengths: dict[int, int] | None = None  # rounds of the group by the drafted tokens they kept


class PeerError(ForerunError):
    """The peer's process ended, went silent or reported that it failed."""


def opening(model: Model, target: str, draft: str | None) -> dict[str, Any]:
    """What a peer is told first.

    Args:
        model: whose target it is beside.
        target: folder, file or id of the target.
        draft: likewise of the draft model; None if the drafter is no model.

    Returns:
        "model", "draft"; "dtype" of the weights, "device", "threads" of the target's executor;
        "context", the longest text; "eos", ends of text; "start", the tokens that a decoder behind
        an encoder starts from, or None; "banned", tokens never written; "python", this interpreter.
    """
    import torch

    facts = model.target.facts
    return {
        "model": target,
        "draft": draft,
        "dtype": facts.precision if facts.precision.startswith(("float", "bfloat")) else "auto",
        "device": str(model.target.device),
        "threads": torch.get_num_threads(),
        "context": model.target.limit,
        "eos": sorted(model.eos),
        "start": None if facts.source_limit is None else list(model.opening.prompt),
        "banned": sorted(getattr(model.target.executor, "banned", ())),
        "python": sys.executable,
    }


def named(text: str, pythons: Mapping[str, str]) -> list[Peer]:
    """Peers that the repository has a runner for, like ``vllm-draft(tokens=5)``, as its
    `benchmarks/peers/names.py` says; `pythons` are interpreters by name."""
    for root in (Path.cwd(), Path(__file__).parents[4]):
        path = root / "benchmarks" / "peers" / "names.py"
        if path.is_file():
            every = runpy.run_path(str(path))["commands"](text, pythons)
            return [Peer(text, words) for words in every]
    raise SettingError(
        "peers by name are run by benchmarks/peers of forerun's repository, which is not at hand; "
        "call it from there, or give a command by `peer`"
    )


class Peer:
    """Somebody else's greedy decoding: a process that speaks the protocol above, closed by `close`.

    Args:
        name: what the user wrote, until it says its own.
        words: the program and its arguments.
    """

    kind: ClassVar[Kind] = "peer"
    certain: ClassVar[bool] = True

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name, self.words = name, words
        self.plain: str | None = None  # the peer that decodes plainly what this one speculates on
        self.largest_batch: int | None = 1
        self.versions: dict[str, str] = {}
        self.arithmetic = "same"
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[str] | None = None

    @classmethod
    def read(cls, text: str) -> Peer:
        """Of a command line, as a shell reads it; `SettingError` if it cannot be read."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise SettingError(f"cannot read the command {text!r}: {error}") from error
        if not words:
            raise SettingError("the command of a peer is empty; give PROGRAM ARGUMENT...")
        return cls(text, words)

    def start(self, first: Mapping[str, Any]) -> str | None:
        """Start it and let it load its models, told `first` what `opening` says; returns why it
        cannot be used, if it cannot."""
        try:
            self._start()
            ready = self._ask(first, START)
        except (ForerunError, OSError) as error:
            self.close()
            return str(error)
        self.name = str(ready.get("name", self.name))
        self.plain = ready.get("plain")
        self.largest_batch = ready.get("rows", 1)
        self.versions = dict(ready.get("versions", {}))
        self.arithmetic = str(ready.get("arithmetic", "same"))
        return None

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, repetition_penalty: float = 1.0
    ) -> Run:
        """Continue prompts (token ids) greedily, each until an end of text or the limit, or raise
        `PeerError`."""
        request = {
            "prompts": [list(p) for p in prompts],
            "max_new_tokens": max_new_tokens,
            "repetition_penalty": repetition_penalty,
        }
        answer = self._ask(request, ANSWER)
        try:
            return Run(float(answer["seconds"]), [list(map(int, t)) for t in answer["tokens"]])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"it answered {str(answer)[:100]}") from error

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Continue these prompts together, timed. A peer takes one limit: where the prompts' own
        differ, it runs to the largest, and only what a prompt was allowed counts."""
        limits = [p.sampling.max_new_tokens for p in prompts]
        penalty = prompts[0].sampling.repetition_penalty
        out = self.generate([p.ids for p in prompts], max(limits), penalty)
        cut = [tokens[:most] for tokens, most in zip(out.tokens, limits, strict=True)]
        return replace(out, tokens=cut)

    def about(self) -> dict[str, Any]:
        """Name, kind, whose arithmetic it has, and versions of its libraries."""
        out = {"name": self.name, "kind": self.kind, "arithmetic": self.arithmetic}
        return out | ({"versions": self.versions} if self.versions else {})

    def close(self) -> None:
        pipes: list[IO[str] | None] = [self._stderr]
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            pipes += [self._process.stdin, self._process.stdout]
        for pipe in pipes:
            with suppress(OSError):  # what was not yet sent cannot be
                if pipe is not None:
                    pipe.close()
        self._process = self._stderr = None

    def _start(self) -> None:
        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115 - closed with the process
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            self.words,
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

    def _ask(self, value: Mapping[str, Any], patience: float) -> dict[str, Any]:
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
            raise PeerError(
                f"its process ended: {(self._errors() or ['without a word'])[-1][:300]}"
            )
        try:
            answer = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise PeerError(f"it wrote {line[:100]!r} in place of a JSON object") from error
        if "error" in answer:
            message = str(answer["error"])[:300]
            # Its own processes may have failed first, and it only says "see above".
            causes = [match.group() for s in self._errors() if (match := CAUSE.search(s))]
            if causes and causes[0] not in message:
                message += f" (first: {causes[0][:300]})"
            raise PeerError(message)
        return answer

    def _errors(self) -> list[str]:
        assert self._stderr is not None
        self._stderr.seek(0)
        return [s for s in self._stderr.read().splitlines() if s.strip()]
