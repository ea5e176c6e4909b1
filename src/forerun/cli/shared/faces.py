"""What becomes of a generation's events: text for people, lines or a document for programs.

`play` runs prompts and passes every event to one `Face`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from forerun.cli.shared.console import (
    STYLES,
    Writer,
    clean,
    coloured,
    count,
    legend,
    one_line,
    progress,
    remark,
    status,
    stderr,
    stdout,
)
from forerun.cli.shared.guard import fail, held
from forerun.cli.shared.models import Job
from forerun.cli.shared.report import SCHEMA, finite, print_json
from forerun.engine import Completion, Event, Piece, Stats
from forerun.errors import SettingError
from forerun.prompts import Prompt
from forerun.requests import Request

SHOWN = 3  # failures that are told of
Compared = dict[str, Any] | None  # as of `lab.paired.paired`, if that was wanted
HEAD = b'{"schema": 1, "index": '  # the beginning of every line of `Lines`
ENDED = {
    "eos": "end of text",
    "stop": "a stop string",
    "length": "--max-new-tokens",
    "context": "a full context",
    "cancelled": "cancelled",
    "error": "an error",
}


class Face:
    """Takes events and shows them; this one shows rounds only, if wanted."""

    _tell: Callable[[], None]

    def __init__(
        self, job: Job, prompts: Sequence[Prompt], rounds: bool = False, explain: bool = True
    ) -> None:
        self.job, self.prompts, self.explain = job, list(prompts), explain
        self.done: dict[int, Completion] = {}  # completions by the place of their prompt
        self.stats: list[Stats] = []  # of all that are complete
        self.before, self.hint = 0, ""  # prompts that were complete before; what goes on if not all
        self.ended = ""  # why the newest of them ended
        self.rounds = itertools.count(1) if rounds else None  # the numbers of those shown
        self._err, self._bar = stderr(), ExitStack()
        self.begin()

    def begin(self) -> None:
        """Before the first event."""

    def event(self, place: int, event: Event) -> None:
        """A round of the prompt at this place."""
        if self.rounds is not None:
            several = len(self.prompts) > 1
            request = self.prompts[place].index if several else None
            show_round(self.job.model.tokenizer, event, next(self.rounds), request)
        if event.completion is not None:
            self.ended = event.completion.finish_reason
            self.finished(place, event.completion)

    def finished(self, place: int, completion: Completion) -> None:
        """A prompt's text is complete."""
        self.done[place] = completion
        self.stats.append(completion.stats)

    def _begin_bar(self) -> None:
        """Begin a bar that counts the prompts that are complete."""
        total = self.before + len(self.prompts)
        tell = self._bar.enter_context(progress("", total, "prompts", console=self._err))
        self._tell = lambda: tell("", self.before + len(self.stats))
        self._tell()

    def close(self) -> None:
        """No more events come, perhaps because of an interrupt."""
        self._bar.close()

    def interrupted(self) -> None:
        done, total = self.before + len(self.stats), self.before + len(self.prompts)
        complete = f"; {done:,} of {total:,} prompts are complete" if total > 1 else ""
        remark(f"interrupted{complete}{self.hint}")

    def end(self, seconds: float) -> None:
        """Every text is complete."""

    def compared(self, result: Compared) -> None:
        """Nothing more comes; everything is compared with plain decoding if that was wanted."""


class JsonDocument(Face):
    """One JSON document; interrupted, with what is complete."""

    def compared(self, result: Compared) -> None:
        from forerun.lab.provenance import versions

        done = sorted(self.done.items())
        settings = self.job.about | {"sampling": [p.sampling.to_json() for p in self.prompts]}
        document = {
            "schema": SCHEMA,
            "complete": len(done) == len(self.prompts) and all(c.error is None for _, c in done),
            "completions": [{**self.prompts[i].to_json(), **c.to_json()} for i, c in done],
            "compare": result,
            "settings": settings,
            "versions": versions(),
        }
        print_json(finite(document))


class Terminal(Face):
    """Text for people; every face for them ends with the summary."""

    wall = True  # whether the summary counts wall time, or that of the rounds

    def begin(self) -> None:
        self._out = stdout()

    def end(self, seconds: float) -> None:
        if self.explain:
            if self._out.is_terminal:
                self._err.print()
            if coloured(self._out):
                remark(legend())
        show_summary(self, seconds if self.wall else None)

    def compared(self, result: Compared) -> None:
        if result is not None:
            show_comparison(result, self.job.rule.lossless)


class Growing(Terminal):
    """One text, as it is written; below a line per round if these are shown. What there is of it
    stays known when it is interrupted."""

    wall = False

    def begin(self) -> None:
        super().begin()
        self._writer, self.written = Writer(self._out), ""
        if self.rounds is None:
            self._open()

    def _open(self) -> None:
        if self._out.is_terminal:
            self._writer.write(self.prompts[0].text, "dim")

    def event(self, place: int, event: Event) -> None:
        self.written += "".join(piece.text for piece in event.pieces)
        if self.rounds is None:
            self._write(event.pieces)
        super().event(place, event)

    def close(self) -> None:
        if self.rounds is not None and self.done:
            self._open()
            self._write(self.done[0].pieces)
        self._writer.flush()
        if self._out.is_terminal or self.written[-1:] not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _write(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._writer.write(piece.text, STYLES[piece.origin])


class Finished(Terminal):
    """Texts in the order of the prompts, as they are finished, above a bar."""

    def begin(self) -> None:
        super().begin()
        self._begin_bar()
        self._next = 0

    def finished(self, place: int, completion: Completion) -> None:
        """Show it, and those it held up."""
        super().finished(place, completion)
        self._tell()
        while self._next in self.done:
            self._show(self._next)
            self._next += 1

    def close(self) -> None:
        """Interrupted, those that waited for others before them are shown, too."""
        for place in sorted(i for i in self.done if i >= self._next):
            self._show(place)
        super().close()

    def _show(self, place: int) -> None:
        prompt, completion, head = self.prompts[place], self.done[place], len(self.prompts) > 1
        name = "" if prompt.id is None else f" ({one_line(str(prompt.id))})"
        line = f"==> prompt {prompt.index + 1}{name} <==\n" if head else ""
        if not self._out.is_terminal:
            apart = "\n" if head and prompt.index else ""
            end = "" if completion.text.endswith("\n") else "\n"
            print(f"{apart}{line}{completion.text}", end=end, flush=True)
            return
        text = Text.assemble((line, "bold"), (clean(prompt.text), "dim"))
        text = Text.assemble(text, *((clean(p.text), STYLES[p.origin]) for p in completion.pieces))
        (self._err if self._err.is_terminal else self._out).print(text, end="\n\n")


class Lines(Face):
    """A line of JSON per completion, as soon as it is complete, on stdout or in a file; prompts
    whose completions the file holds are left out."""

    def __init__(
        self, job: Job, prompts: Sequence[Prompt], rounds: bool = False, output: str | None = None
    ) -> None:
        self._keys = [_key(job, prompt) for prompt in prompts]
        kept = set() if output is None else _completed(Path(output), self._keys)
        super().__init__(job, [p for p in prompts if p.index not in kept], rounds)
        self._output, self.before = output, len(kept)
        self.hint = "" if output is None else "; the same command goes on from here"
        if kept:
            remark(f"{output} holds {len(kept):,} of {len(prompts):,} prompts; going on")
        self._begin_bar()
        self._file = sys.stdout if output is None else open(output, "a", encoding="utf-8")  # noqa: SIM115

    def finished(self, place: int, completion: Completion) -> None:
        prompt = self.prompts[place]
        value = {"schema": SCHEMA, **prompt.to_json(), "key": self._keys[prompt.index]}
        value = finite(value | completion.to_json())
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
        try:
            print(line, file=self._file, flush=True)
        except OSError as error:  # of a full disk, say, Python does not tell which file it is on
            raise OSError(error.errno, error.strerror, self._output) from error
        self.stats.append(completion.stats)
        self._tell()

    def close(self) -> None:
        super().close()
        if self._output is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take was told
                self._file.close()

    def end(self, seconds: float) -> None:
        show_summary(self, seconds)


def play(job: Job, face: Face, compare: bool = False) -> None:
    """Run prompts and show them; an interrupt takes effect between rounds. Whatever was complete
    then has been passed on."""
    began, last, stopping = time.perf_counter(), -1, False
    failures: dict[int, str] = {}
    how: dict[str, Any] = {"stream": job.first_token_soon, "logprobs": job.logprobs}
    asked = [(p.sampling, *job.model.context(p.ids)) for p in face.prompts]
    requests = [
        Request(ids, sampling, job.controller, job.rule, source, **how)
        for sampling, ids, source in asked
    ]
    stream = job.model.run(requests, job.batch_size)
    try:
        try:
            with closing(stream), held() as interrupt:
                for event in stream if face.prompts else ():
                    face.event(event.request, event)
                    if event.completion is not None and event.completion.error is not None:
                        failures[event.request] = event.completion.error
                    # Within a round the requests' numbers rise.
                    if stopping and event.request <= last:
                        break
                    last, stopping = event.request, interrupt.requested
        finally:
            face.close()
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted or face.done:
            face.compared(None)
        if interrupted:
            face.interrupted()
        raise
    face.end(time.perf_counter() - began)
    if failures:
        face.compared(None)
        several = len(face.prompts) > 1
        lines = [
            f"prompt {face.prompts[place].index + 1}: {reason}" if several else reason
            for place, reason in sorted(failures.items())
        ]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise typer.Exit(fail("; ".join(lines[:SHOWN]) + more, 1))
    compared = _compared(job, face) if compare else None
    face.compared(compared)
    if compared is not None and _bug(compared):
        raise typer.Exit(fail("greedy output differs from plain decoding: please report this", 1))


def _compared(job: Job, face: Face) -> dict[str, Any]:
    from forerun.lab.paired import paired

    how: dict[str, Any] = {"controller": job.controller, "rule": job.rule}
    how["batch_size"] = job.batch_size
    ids, samplings = [p.ids for p in face.prompts], [p.sampling for p in face.prompts]
    with status("comparing") as tell:
        shown = [face.done[i] for i in range(len(face.prompts))]
        return paired(job.model, ids, samplings, shown, **how, tell=tell)


def warm_up(job: Job, prompt: Prompt) -> None:
    """A few tokens both ways, so that first-time costs fall on neither measurement."""
    short = replace(prompt.sampling, max_new_tokens=12, min_new_tokens=0)
    with status("warming up"):
        job.model.target.executor.finish()
        for plain in (False, True):
            job.model.generate([prompt.ids], controller=job.controller, sampling=short, plain=plain,
                               rule=None if plain else job.rule)  # fmt: skip


def show_round(tokenizer: Any, event: Event, number: int, request: int | None = None) -> None:
    """Print a line about a round on stderr, with the number of its request if there are more."""
    r = event.round
    ms = 1e3 * (r.draft_seconds + r.verify_seconds + r.other_seconds)
    row = "" if request is None else f"prompt {request + 1:<3} "
    # Of the round's tokens, as in the summary; the target's own add none.
    drifted = "" if r.drift is None else f"drift {sum(r.drift) / max(r.committed, 1):.3f}  "
    line = Text(
        f"{row}round {number:>3}  drafted {r.drafted:>2}  accepted {r.accepted:>2}  "
        f"committed {r.committed:>2}  {r.stopped_by.label:<11} {ms:7.1f} ms  {drifted}"
    )
    dropped = event.drafted[r.accepted :]
    rejected = one_line(tokenizer.decode(dropped)) if dropped else ""
    console = stderr()
    line.append_text(_words(event.pieces, rejected, coloured(console)))
    console.print(line, soft_wrap=True)


def _words(pieces: Sequence[Piece], rejected: str, colours: bool) -> Text:
    words = Text()
    for piece in pieces:
        if piece.origin == "draft":
            words.append(one_line(piece.text), STYLES["draft"])
    if rejected:
        words.append(rejected if colours else f"[-{rejected}-]", "red strike")
    for piece in pieces:
        if piece.origin != "draft" and (text := one_line(piece.text)):
            words.append(text if colours else f"{{+{text}+}}", STYLES[piece.origin])
    return words


def _key(job: Job, prompt: Prompt) -> str:
    """A hash that identifies a request: its tokens and the settings its text depends on."""
    names = ("target", "draft", "controller", "rule", "dtype")
    settings = {name: job.about.get(name) for name in names}
    value = [prompt.ids, finite(prompt.sampling.to_json()), settings]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _completed(path: Path, keys: Sequence[str]) -> set[int]:
    """Indices of the requests whose completions a file holds, whose last line is removed if it is
    cut off; `SettingError` if it holds something else, or completions of other requests."""
    if not path.is_file():  # a device, like /dev/full, holds nothing or goes on for ever
        return set()
    completed, size = set(), 0
    with path.open("r+b") as file:
        for line in file:
            if not (line.startswith(HEAD) or HEAD.startswith(line.rstrip(b"\n"))):
                raise SettingError(f"{path} holds something else; name another file")
            if not line.endswith(b"\n"):  # cut off in the middle of writing
                file.truncate(size)
                break
            size += len(line)
            try:
                value = json.loads(line)
                index, key = value["index"], value["key"]
            except (ValueError, KeyError) as error:
                raise SettingError(f"{path} is damaged: {error!r}; name another file") from error
            if not (type(index) is int and index < len(keys) and keys[index] == key):
                raise SettingError(
                    f"{path} holds completions of other prompts, settings or models; name another "
                    "file"
                )
            completed.add(index)
    return completed


def show_summary(face: Face, seconds: float | None) -> None:
    """Print a line about a run on stderr: tokens, rounds, acceptance, speed, where the time went;
    and a warning of a lossy rule. `seconds` is the wall time, None the sum of the texts' own."""

    def total(name: str) -> Any:
        return sum(getattr(stats, name) for stats in face.stats)

    tokens, rounds, judged = total("tokens"), total("rounds"), total("judged")
    took = total("seconds") if seconds is None else seconds
    acceptance = f"{total('accepted') / judged:.0%}" if judged else "– (nothing drafted)"
    spent = {n: total(f"{n}_seconds") for n in ("draft", "verify", "other")}
    spent["else"] = spent.pop("other")
    whole = sum(spent.values())
    encoded = [s.encode_seconds for s in face.stats if s.encode_seconds is not None]
    lossy = [s for s in face.stats if s.drift_mean is not None]
    drift = sum((s.drift_mean or 0.0) * s.tokens for s in lossy) / max(tokens, 1)
    most = max((s.drift_max or 0.0 for s in lossy), default=0.0)
    one = len(face.stats) == 1
    parts = [
        "" if one else count(len(face.stats), "prompt"),
        f"{count(tokens, 'token')} in {count(rounds, 'round')}",
        f"{tokens / rounds:.2f} per round" if rounds else "",
        f"acceptance {acceptance}",
        f"{tokens / took:.0f} tokens/s" if took > 0 else "",
        f"drift {_small(drift)} a token (max {_small(most)})" if lossy else "",
        ", ".join(f"{name} {part / whole:.0%}" for name, part in spent.items() if whole),
        f"encoding {1e3 * sum(encoded):.0f} ms" if encoded else "",
        f"ended by {ENDED[face.ended]}" if one else "",
    ]
    remark(Text(" · ".join(p for p in parts if p), "bold"))
    if not face.job.rule.lossless:
        rule = face.job.about.get("rule", "")
        remark(Text(f"lossy rule {rule}: the text may differ from the target's own", "yellow"))


def _small(value: float) -> str:
    return "below 0.001" if 0 < value < 0.001 else f"{value:.2g}"


def show_comparison(result: dict[str, Any], lossless: bool) -> None:
    """Print speed-up and whether the outputs are the same, on stderr."""
    ratios, ours, plain = result["speedups"], result["tokens_per_second"], result["plain"]
    line = (
        f"{result['speedup']:.2f}× the speed of plain decoding "
        f"({ours:.0f} against {plain['tokens_per_second']:.0f} tokens/s; median of {len(ratios)} "
        f"paired runs, {min(ratios):.2f}–{max(ratios):.2f})"
    )
    remark(Text(line, "bold"))
    remark(_sameness(result, lossless))


def _bug(result: dict[str, Any]) -> bool:
    """Whether outputs differ that no rounding explains."""
    return not all(one["near_tie"] for one in result["differences"])


def _sameness(result: dict[str, Any], lossless: bool) -> Text:
    if result["identical"]:
        return Text("identical output: yes, token for token", "green")
    if not result["must_match"]:
        alike = "both are draws from the same distribution"
        reason = alike if lossless else "the rule is lossy"
        return Text(f"identical output: no, and it need not be: {reason}", "dim")
    lines = Text("identical output: NO", "red" if _bug(result) else "yellow")
    for one in result["differences"]:
        lines.append(f"\n  prompt {one['request'] + 1}: {clean(one['message'])}")
    return lines
