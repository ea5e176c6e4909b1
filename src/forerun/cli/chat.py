"""`forerun chat`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.shared import options
from forerun.cli.shared.console import legend, remark, stdout
from forerun.cli.shared.faces import Growing, play
from forerun.cli.shared.models import Chat, Job, Models, PolicyOptions
from forerun.cli.shared.options import SAMPLING, Fields
from forerun.engine import Completion
from forerun.errors import ForerunError, PromptError, SettingError
from forerun.prompts import Prompt, Reader
from forerun.requests import Sampling
from forerun.zoo import SMOLLM2, smollm2

HELP = "/system TEXT, /retry, /clear, /save FILE, /help, /quit; Ctrl-C stops an answer"
PLAIN = 16  # tokens decoded plainly behind an answer, to tell how much faster it came
PREFIXES = 256 << 20  # bytes for the conversation so far, so that no turn is read twice


OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed")
"""Options of sampling; what is not given the model's own settings say."""


@options.command
def chat(
    models: Annotated[Models, Fields(Models)],
    sampling: Annotated[dict[str, Any], Fields(Sampling, SAMPLING, OWN, optional=True)],
    opened: Annotated[Chat, Fields(Chat, only=("system",))],
    policies: Annotated[PolicyOptions, Fields(PolicyOptions)],
    rounds: options.Rounds = False,
) -> None:
    """Talk to a model that runs ahead of itself: without --target to smollm2 if it is installed.

    Takes the model's own generation settings where no option is given. Commands: /system TEXT,
    /retry, /clear, /save FILE, /help, /quit. From a pipe every line is a turn.
    """
    given = options.sampling(sampling)
    if models.target is None and smollm2() is not None:
        models = replace(models, target=SMOLLM2)
    job = models.load(policies.resolve(), batch_size=1, remember=policies.remember is not False)
    Conversation(job, given, opened.system, rounds).run()


class Conversation:
    """Turns of a user and a model, and the commands between them."""

    def __init__(
        self, job: Job, given: dict[str, Any], system: str | None = None, rounds: bool = False
    ) -> None:
        from forerun.chat import has_template, turns
        from forerun.engine.prefixes import Prefixes
        from forerun.runtime.load import generation_config, sampling_settings

        if not has_template(job.model.tokenizer):
            raise PromptError("this model has no chat template; forerun generate continues texts")
        config = generation_config(job.model.target)
        own = sampling_settings(config)
        if not getattr(config, "do_sample", None):  # as generate of transformers takes it
            own["temperature"] = 0.0
        self._sampling = {"max_new_tokens": 1024, **own, **given}
        self._job, self._rounds, self._lead = job, rounds, turns(job.model.tokenizer).lead
        self.system, self.messages = system, list[dict[str, Any]]()
        caches = job.model.target, *job.model.drafter.caches
        job.model.prefixes = Prefixes.of(PREFIXES, caches)

    def run(self) -> None:
        shown = ", ".join(f"{k} {v:g}" for k, v in self._sampling.items())
        remark(legend())
        remark(f"{shown}; {HELP}")
        for line in _lines():
            try:
                if line.startswith("/"):
                    if not self.command(*line[1:].partition(" ")[::2]):
                        return
                elif line.strip():
                    self.ask(line)
            except (ForerunError, OSError) as error:
                full = isinstance(error, PromptError) and len(self.messages) > 1
                remark(f"error: {error}{'; /clear begins anew' if full else ''}")
            except typer.Exit:  # an answer ended with an error, which is on the terminal
                pass

    def command(self, name: str, rest: str) -> bool:
        """Do what a line that begins with a slash says; False to leave."""
        if name == "system":
            self.system = rest.strip() or None
        elif name == "clear":
            self.messages.clear()
        elif name == "retry":
            self.retry()
        elif name == "save":
            self.save(rest.strip())
        elif name in ("quit", "exit"):
            return False
        else:
            remark(HELP)
        return True

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except (ForerunError, typer.Exit):
            self.messages.pop()
            raise

    def retry(self) -> None:
        """Take the last answer back and ask for another; drawn anew, greedily the same."""
        if not self.messages:
            raise SettingError("there is nothing to answer yet")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self._answer()

    def save(self, path: str) -> None:
        """Write the conversation as a line that `generate --prompt-file` takes."""
        if not path:
            raise SettingError("/save wants the name of a file")
        with Path(path).expanduser().open("w", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self._opened}, ensure_ascii=False) + "\n")

    @property
    def _opened(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _answer(self) -> None:
        reader = Reader.of(self._job.model)
        [prompt] = reader.prepare([Prompt(list(self._opened))], self._sampling)
        face = Growing(self._job, [replace(prompt, text="")], self._rounds, explain=False)
        try:
            play(self._job, face)
        except KeyboardInterrupt:  # what was written stays said
            pass
        else:
            note_speed_up(self._job, prompt, face.done[0])
        text = face.done[0].text if face.done else face.written
        self.messages.append({"role": "assistant", "content": text.removeprefix(self._lead)})


def note_speed_up(job: Job, prompt: Prompt, done: Completion) -> None:
    """Say how much faster than plain decoding an answer came, by some of it decoded plainly."""
    count = min(PLAIN, done.stats.tokens)
    if count < PLAIN:
        return
    how = replace(prompt.sampling, max_new_tokens=count, min_new_tokens=0, seed=done.seed)
    plain = job.model.generate([prompt.ids], sampling=how, plain=True, rule=None)[0]
    paces = [_pace(completion) for completion in (plain, done)]
    if all(paces) and plain.stats.tokens == count:
        remark(f"{paces[0] / paces[1]:.2f}× the speed of plain decoding (its first {count} "
             "tokens, the prompt apart)")  # fmt: skip


def _pace(done: Completion) -> float:
    """Seconds per token once the prompt is read."""
    stats = done.stats
    first = done.rounds[0].committed if done.rounds else 0
    return (stats.seconds - stats.first_token_seconds) / max(stats.tokens - first, 1)


def _lines() -> Iterator[str]:
    """What the user types; an interrupt or the end of input ends it."""
    if not sys.stdin.isatty():
        try:
            for line in sys.stdin:
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin is not UTF-8 text: {error}") from error
        return
    import readline  # noqa: F401  arrows and history

    while True:
        try:
            yield input("\n> " if stdout().is_terminal else "")
        except EOFError:
            return
