"""Running requests: what `generate` and `demo` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.cli.shared.console import note, status, stderr
from forerun.cli.shared.guard import held
from forerun.errors import ForerunWarning, GenerationError, SettingError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun import Model
    from forerun.cli.shared.inputs import Reader, Row
    from forerun.controllers import LengthController
    from forerun.engine import Completion, Event
    from forerun.rules import AcceptanceRule
    from forerun.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Everything that stays the same while requests run."""

    model: Model
    controller: LengthController
    rule: AcceptanceRule
    batch_size: int = 16
    about: dict[str, Any] = field(default_factory=dict)
    """Settings as reported in the JSON document."""
    logprobs: int | None = None
    first_token_soon: bool = False
    """As for `Model.stream`."""


@dataclass(frozen=True)
class Timed:
    """Completions of one batch and the wall seconds they took together."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens(self) -> int:
        """Output tokens of all of them."""
        return sum(c.stats.tokens for c in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """All output tokens over the whole time, prefill included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """Models and policies as requested.

    What is None comes from the file `settings`, or is the default.
    """

    target: str | None = None
    draft: str | None = None
    controller: str | None = None
    rule: str | None = None
    settings: str | None = None
    batch_size: int = 16
    runtime: str | None = None
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    language: str | None = None
    decoder_prompt: str | None = None

    @classmethod
    def alone(
        cls,
        target: str | None,
        device: str | None,
        dtype: str | None,
        trust_remote_code: bool,
        batch_size: int = 16,
    ) -> Plan:
        """The target and no drafter."""
        return cls(
            target,
            "none",
            "fixed(0)",
            "gumbel",
            batch_size=batch_size,
            runtime="torch",
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )

    def load(self) -> Job:
        """Check everything, then load the models."""
        return self.open(lambda reader: None)[0]

    def open(self, prepare: Callable[[Reader], T]) -> tuple[Job, T]:
        """Load the models, and prepare the prompts: before, as far as the weights are not needed.

        Args:
            prepare: reads the prompts with the target's tokenizer, or raises their
                errors.

        Raises:
            ForerunError: a setting, a prompt or a model that cannot be used.
        """
        from forerun import zoo
        from forerun.cli.shared.inputs import Reader

        with status(f"loading {self.target or 'the models that ship'}"), _quiet():
            chosen, length, keep = self._check()
            reader = Reader.open(zoo.locate(self.target), self.trust_remote_code)
            early = None if reader is None else (prepare(reader),)
            job = self._load(chosen.drafter, length, keep)
        return job, early[0] if early else prepare(Reader.of(job.model))

    def _check(self) -> tuple[Settings, LengthController, AcceptanceRule]:
        """Errors that need no model are raised before one is loaded."""
        from forerun.controllers import CONTROLLERS
        from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE
        from forerun.rules import RULES
        from forerun.runtime.load import resolve_device, resolve_dtype
        from forerun.runtime.runtimes import RUNTIMES, default_runtime
        from forerun.settings import resolve

        require(self.batch_size >= 1, "batch size", self.batch_size, "≥ 1")
        chosen = resolve(
            self.settings, controller=self.controller, rule=self.rule, draft=self.draft
        )
        length = CONTROLLERS.make(chosen.controller or DEFAULT_CONTROLLER)
        keep = RULES.make(chosen.rule or DEFAULT_RULE)
        RUNTIMES.make(self.runtime or default_runtime())
        resolve_device(self.device)
        resolve_dtype(self.dtype)
        return chosen, length, keep

    def _load(self, draft: str | None, length: LengthController, keep: AcceptanceRule) -> Job:
        from forerun.controllers import CONTROLLERS
        from forerun.model import default_draft, load
        from forerun.rules import RULES

        model = load(
            self.target,
            draft,
            runtime=self.runtime,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )
        model.opening = model.open(self.language, self.decoder_prompt)
        default = "shipped" if self.target is None else str(default_draft(self.target))
        about = {
            "target": self.target or "shipped",
            "draft": draft or default,
            "controller": CONTROLLERS.text(length),
            "rule": RULES.text(keep),
            "lossless": keep.lossless,
            "batch_size": self.batch_size,
            "device": str(model.target.device),
            "dtype": model.target.facts.precision,
            "runtime": model.target.facts.executor,
        }
        return Job(model, length, keep, self.batch_size, about)


def require_draft_model(target: str | None, draft: str | None, doing: str) -> None:
    """Refuse a drafter that is no model before anything is loaded."""
    from forerun.drafters.model import ModelDraft
    from forerun.drafters.shared import SharedDraft
    from forerun.model import default_draft, drafter_spec

    good = isinstance(drafter_spec(draft or default_draft(target)), (ModelDraft, SharedDraft))
    if draft is None:
        if not good:
            raise SettingError(f"{doing} needs a draft model; give --draft ID_OR_PATH")
    elif not good:
        raise SettingError(
            f"{doing} needs a draft model, and --draft {draft} is none; give a folder or a "
            "Hugging Face id"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own messages off the terminal while they load."""
    import warnings

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.set_verbosity_error()
    hub.set_verbosity_error()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ForerunWarning)
        yield
    for warning in caught:
        note(stderr(), str(warning.message))


def run(
    job: Job,
    rows: Sequence[Row],
    *,
    plain: bool = False,
    on_event: Callable[[int, Event], None] | None = None,
) -> Timed:
    """Generate for every row and keep the completions; `on_event` as for `play_through`."""
    done: dict[int, Completion] = {}

    def collect(index: int, event: Event) -> None:
        if on_event is not None:
            on_event(index, event)
        if event.completion is not None:
            done[index] = event.completion

    seconds = play_through(job, rows, collect, plain=plain)
    if failed := [c.error for c in done.values() if c.error]:
        if len(failed) == len(done):
            raise GenerationError(failed[0])
        note(stderr(), f"{len(failed)} of {len(done)} prompts failed; the first: {failed[0]}")
    return Timed([done[i] for i in sorted(done)], seconds)


def play_through(
    job: Job, rows: Sequence[Row], on_event: Callable[[int, Event], None], *, plain: bool = False
) -> float:
    """Generate for every row; the wall seconds it took.

    An interrupt takes effect between rounds, so that whatever was complete has been passed on.

    Args:
        job: models and policies.
        rows: the requests.
        on_event: gets (index among `rows`, event) as rounds end.
        plain: leave the drafter out.
    """
    began, last, stopping = time.perf_counter(), -1, False
    stream = job.model.stream(
        [row.ids for row in rows],
        controller=job.controller,
        rule=None if plain else job.rule,
        sampling=[row.sampling for row in rows],
        batch_size=job.batch_size,
        plain=plain,
        logprobs=job.logprobs,
        first_token_soon=job.first_token_soon,
    )
    with closing(stream), held() as interrupt:  # type: ignore[type-var]
        for event in stream:
            on_event(event.request, event)
            # Within a round the requests' numbers rise.
            if stopping and event.request <= last:
                break
            last, stopping = event.request, interrupt.requested
    return time.perf_counter() - began


def warm_up(job: Job, row: Row) -> None:
    """A few tokens both ways, so that first-time costs fall on neither measurement."""
    short = replace(row, sampling=replace(row.sampling, max_new_tokens=12, min_new_tokens=0))
    run(job, [short])
    run(job, [short], plain=True)
