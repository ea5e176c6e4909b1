"""What goes back to a client: whole answers and the frames of a stream, as plain JSON values."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from forerun import __version__
from forerun.engine import Completion, Event, Logprob
from forerun.serve import reports
from forerun.serve.errors import ApiError
from forerun.serve.plans import AnswerPlan
from forerun.serve.streaming import DONE, event
from forerun.serve.texts import Texts
from forerun.serve.tools import Call, CallReader

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
"""OpenAI's words for the engine's."""
WINDOW = 4  # tokens of context that decide how the next one is written


class Choice:
    """One text while it grows."""

    def __init__(self, prompt: Sequence[int], reader: CallReader | None = None) -> None:
        self.context = list(prompt)
        self.reader = reader
        self.calls: list[tuple[Call, str]] = []  # what calls grew by with the last update
        self.tokens = 0  # written so far
        self.text: list[str] = []
        self.begun = False  # whether there is any
        self.offset = 0  # characters of the tokens whose log-probabilities were shown
        self.done: Completion | None = None
        self.queued = 0.0
        self.report: dict[str, list[Any]] = {}


class Answer:
    """Builds the answer to one plan, by a model of this name; `read` is what it said of prompts."""

    def __init__(
        self, plan: AnswerPlan, model: str, texts: Texts, read: Sequence[Sequence[Logprob]] = ()
    ) -> None:
        self._plan, self._texts, self._read = plan, texts, read
        # By number, tokens of the same text do not collide.
        numbered = plan.request.return_tokens_as_token_ids
        self._name = "token_id:{}".format if numbered else texts.token
        kind = "chatcmpl" if plan.chat else "cmpl"
        self.id = f"{kind}-{secrets.token_hex(12)}"
        self.created, self.model = int(time.time()), model
        options = plan.request.stream_options
        self._usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._rounds = plan.policy.report == "rounds"
        self._lead = texts.turns.lead if plan.opens_turn else ""
        self._marks = plan.calling.marks if plan.calling else {}
        self.choices = [  # prompt by prompt, copies side by side
            Choice(prompt, CallReader(plan.calling) if plan.calling else None)
            for prompt in plan.prompts
            for _ in range(plan.copies)
        ]

    # --- taking updates ---------------------------------------------------------------------

    def take(self, event: Event) -> tuple[str, dict[str, Any] | None]:
        """Add an event: the text that is new, and the report of its round if one is wanted."""
        choice, done = self.choices[event.request], event.completion
        choice.queued = event.queued
        choice.tokens += len(event.pieces)
        text = "".join(piece.text or self._marks.get(piece.token, "") for piece in event.pieces)
        report = self._round(choice, event) if self._rounds and event.pieces else None
        choice.context.extend(piece.token for piece in event.pieces)
        if done is not None:
            choice.done = done
            text = self._ending(choice, done, text)
        if text and not choice.begun:
            choice.begun, text = True, text.removeprefix(self._lead)
        if choice.reader is not None:
            new = list(choice.reader.push(text, done is not None))
            choice.calls = [delta for delta in new if not isinstance(delta, str)]
            text = "".join(delta for delta in new if isinstance(delta, str))
        choice.text.append(text)
        return text, report

    def _ending(self, choice: Choice, done: Completion, text: str) -> str:
        """The last text: without an ordinary token that ends it, with a stop string if wanted."""
        request = self._plan.request
        if done.finish_reason == "stop" and request.include_stop_str_in_output:
            return text + str(self._reason(done) or "")
        if done.finish_reason == "eos" and not self._texts.special(done.tokens[-1]):
            own = self._texts.pieces(done.tokens[-1:], choice.context[:-1])
            return text.removesuffix(own[0])
        return text

    def _reason(self, done: Completion) -> str | int | None:
        """vLLM's `stop_reason`: the stop string or token of the request's own that was met."""
        return done.ended_by if done.ended_by in self._plan.ends else None

    def _round(self, choice: Choice, event: Event) -> dict[str, Any]:
        shown = self._texts.pieces(event.drafted, choice.context[-WINDOW:])
        proposed = {"proposed": event.drafted, "proposed_texts": shown}
        report: dict[str, list[Any]] = {
            "tokens": [piece.token for piece in event.pieces],
            "texts": [piece.text for piece in event.pieces],
            "origins": [piece.origin.value for piece in event.pieces],
            "rounds": [{**event.round.to_json(), **proposed}],
        }
        for name, values in report.items():
            choice.report.setdefault(name, []).extend(values)
        return report

    # --- whole answers ----------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i) for i in range(len(self.choices))]
        kind = "chat.completion" if self._plan.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage(), **self.extras()}

    def _choice(self, index: int) -> dict[str, Any]:
        choice, request = self.choices[index], self._plan.request
        done = choice.done
        assert done is not None, "a choice was answered before it was done"
        text = "".join(choice.text)
        out: dict[str, Any] = {"index": index}
        if self._plan.chat:
            out["message"] = {"role": "assistant", "content": text, "refusal": None}
            if choice.reader and choice.reader.calls:
                called = [call.to_json() for call in choice.reader.calls]
                out["message"] |= {"content": text or None, "tool_calls": called}
        else:
            out["text"] = (self._prompt_text(index) if self._plan.echo else "") + text
        out["logprobs"] = self._logprobs(index, done.tokens, done.logprobs or (), self._plan.echo)
        out |= {"finish_reason": _finish(choice), "stop_reason": self._reason(done)}
        if request.return_token_ids:
            out["prompt_token_ids"] = list(self._plan.jobs[index].prompt)
            out["token_ids"] = done.tokens
        if self._rounds:
            out["forerun"] = choice.report
        return out

    def _logprobs(
        self, index: int, tokens: Sequence[int], scores: Sequence[Logprob], echo: bool = False
    ) -> dict[str, Any] | None:
        """Of tokens just written, after those of the prompt with `echo`; None if unwanted."""
        plan, choice = self._plan, self.choices[index]
        if plan.top is None:
            return None
        entries: list[reports.Entry] = list(zip(tokens, scores, strict=True))
        if echo:
            read: list[Logprob | None] = [None, *self._read[index // plan.copies]]
            entries = [*zip(plan.jobs[index].prompt, read, strict=True), *entries]
        if plan.chat:
            return reports.chat_logprobs(entries, plan.top, self._name, self._texts.bytes)
        out = reports.completion_logprobs(entries, plan.top, self._name, choice.offset)
        choice.offset += sum(map(len, out["tokens"]))
        return out

    def _prompt_text(self, index: int) -> str:
        prompts: Any = getattr(self._plan.request, "prompt", "")
        prompt = index // self._plan.copies
        if isinstance(prompts, str):
            return prompts
        if isinstance(prompts[prompt], str) and not isinstance(prompts[0], int):
            return str(prompts[prompt])
        return self._texts.prompt(self._plan.prompts[prompt])

    # --- streams ----------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Frames before anything was written: chat's roles, or the prompt with echo."""
        out = b""
        for index in range(len(self.choices)):
            if self._plan.chat:
                out += event(self._chunk(index, {"role": "assistant", "content": ""}))
            elif self._plan.echo:
                frame = self._chunk(index, self._prompt_text(index))
                frame["choices"][0]["logprobs"] = self._logprobs(index, (), (), echo=True)
                out += event(frame)
        return out

    def frame(self, update: Event) -> bytes:
        """What is sent of an event; nothing where there is nothing to say."""
        text, report = self.take(update)
        done, index, request = update.completion, update.request, self._plan.request
        by_token = self._plan.top is not None or request.return_token_ids
        calls = self.choices[index].calls
        if not (text or report or calls or done or (by_token and update.pieces)):
            return b""
        delta: Any = {"content": text} if self._plan.chat and text else text or {}
        if calls:
            delta = (delta or {}) | {"tool_calls": [_called(*call) for call in calls]}
        frame = self._chunk(index, delta)
        choice = frame["choices"][0]
        tokens = [piece.token for piece in update.pieces]
        if tokens:
            choice["logprobs"] = self._logprobs(index, tokens, update.logprobs)
        if request.return_token_ids:
            choice["token_ids"] = tokens
        if report is not None:
            choice["forerun"] = report
        if done is not None:
            choice["finish_reason"] = _finish(self.choices[index])
            choice["stop_reason"] = self._reason(done)
            if all(other.done for other in self.choices):
                frame |= self.extras()
        return event(frame)

    def _chunk(self, index: int, content: Any) -> dict[str, Any]:
        chat = self._plan.chat
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": content or {}} if chat else {"text": content or ""}
        choice |= {"logprobs": None, "finish_reason": None}
        kind = "chat.completion.chunk" if chat else "text_completion"
        frame = {**self._head(kind), "choices": [choice]}
        if self._usage or self._always:
            frame["usage"] = self.usage() if self._always else None
        return frame

    def closing(self) -> bytes:
        """What comes after the last frame: the usage if it was asked for, and the mark."""
        if not self._usage:
            return DONE
        kind = "chat.completion.chunk" if self._plan.chat else "text_completion"
        return event({**self._head(kind), "choices": [], "usage": self.usage()}) + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.to_json())

    # --- about it ---------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        wrote = sum(c.tokens for c in self.choices)
        out = reports.usage(self._plan.prompts, wrote, self._cached())
        if self._plan.request.prediction is not None:
            done = [c.done for c in self.choices if c.done is not None]
            out["completion_tokens_details"] = reports.predictions(done)
        return out

    def _cached(self) -> int:
        return reports.cached([choice.done for choice in self.choices], self._plan.copies)

    def extras(self) -> dict[str, Any]:
        """What is reported of finished choices: timings always, the rest on request."""
        plan = self._plan
        done = [choice.done for choice in self.choices if choice.done is not None]
        queued = [choice.queued for choice in self.choices]
        out: dict[str, Any] = {"timings": reports.timings(plan.prompts, done, self._cached())}
        if plan.policy.report != "none":
            out["metrics"] = reports.metrics(done, queued, self._rounds)
            out["forerun"] = reports.forerun(plan.policy, done, queued)
        if plan.ignored:
            out["ignored_fields"] = list(plan.ignored)
        return out

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"forerun-{__version__}",
        }


def _finish(choice: Choice) -> str:
    assert choice.done is not None
    reason = FINISH[choice.done.finish_reason]
    called = reason == "stop" and choice.reader is not None and choice.reader.calls
    return "tool_calls" if called else reason


def _called(call: Call, arguments: str) -> dict[str, Any]:
    """What a call grew by: its name at first, then its arguments."""
    if arguments:
        return {"index": call.index, "function": {"arguments": arguments}}
    begun = Call(call.index, call.name, id=call.id)
    return {"index": call.index, **begun.to_json()}
