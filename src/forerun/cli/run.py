"""Running requests: what `generate` and `demo` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun.cli.console import note, status, stderr
from forerun.errors import ForerunWarning, GenerationError, SettingError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun import Model
    from forerun.cli.inputs import Row
    from forerun.controllers import LengthController
    from forerun.engine import Completion, Event
    from forerun.rules import AcceptanceRule


@dataclass(frozen=True)
class Job:
    """Everything that stays the same while requests run."""

    model: Model
    controller: LengthController
    rule: AcceptanceRule
    batch_size: int = 16
    about: dict[str, Any] = field(default_factory=dict)
    """Settings as reported in the JSON document."""


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


def load_job(
    target: str | None,
    draft: str | None,
    controller: str | None,
    rule: str | None,
    *,
    settings: str | None = None,
    batch_size: int = 16,
    exits: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Job:
    """Check the settings, then load the models (with a spinner on terminals).

    What is None comes from the file `settings`, or is the default.
    """
    with status(f"loading {target or 'the models that ship'}"), _quiet():
        from forerun.controllers import CONTROLLERS
        from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, load
        from forerun.rules import RULES
        from forerun.runtime.load import resolve_device, resolve_dtype
        from forerun.settings import resolve

        require(batch_size >= 1, "batch size", batch_size, "≥ 1")
        chosen = resolve(settings, controller=controller, rule=rule, draft=draft)
        length = CONTROLLERS.make(chosen.controller or DEFAULT_CONTROLLER)
        keep = RULES.make(chosen.rule or DEFAULT_RULE)
        draft = chosen.drafter
        # Mistakes that need no model are told before one is loaded.
        resolve_device(device)
        resolve_dtype(dtype)
        model = load(
            target,
            draft,
            exits=exits,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    about = {
        "target": target or "shipped",
        "draft": draft or ("specbound" if exits else "shipped" if target is None else "lookup"),
        "controller": CONTROLLERS.text(length),
        "rule": RULES.text(keep),
        "lossless": keep.lossless,
        "batch_size": batch_size,
        "device": str(model.target.device),
        "dtype": str(getattr(model.target, "dtype", "")).removeprefix("torch."),
    }
    return Job(model, length, keep, batch_size, about)


def require_draft_model(target: str | None, draft: str | None, doing: str) -> None:
    """Refuse a drafter that is no model before anything is loaded."""
    from forerun.drafters.model import ModelDraft
    from forerun.model import drafter_spec

    if draft is None:
        if target is not None:
            raise SettingError(f"{doing} needs a draft model; give --draft ID_OR_PATH")
    elif not isinstance(drafter_spec(draft), ModelDraft):
        raise SettingError(
            f"{doing} needs a draft model, and --draft {draft} is none; give a folder or a "
            "Hugging Face id"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own chatter off the terminal while they load."""
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
    """Generate for every row; `on_event` gets (index of the row, event) as rounds end."""
    done: dict[int, Completion] = {}
    began = time.perf_counter()
    stream = job.model.stream(
        [row.ids for row in rows],
        controller=job.controller,
        rule="standard" if plain else job.rule,
        sampling=[row.sampling for row in rows],
        batch_size=job.batch_size,
        plain=plain,
    )
    try:
        for event in stream:
            if on_event is not None:
                on_event(event.request, event)
            if event.completion is not None:
                done[event.request] = event.completion
    finally:
        stream.close()  # type: ignore[attr-defined]
    if failed := [c.error for c in done.values() if c.error]:
        if len(failed) == len(done):
            raise GenerationError(failed[0])
        note(stderr(), f"{len(failed)} of {len(done)} prompts failed; the first: {failed[0]}")
    return Timed([done[i] for i in sorted(done)], time.perf_counter() - began)


def warm_up(job: Job, row: Row) -> None:
    """A few tokens both ways, so that first-time costs fall on neither measurement."""
    short = replace(row, sampling=replace(row.sampling, max_new_tokens=12, min_new_tokens=0))
    run(job, [short])
    run(job, [short], plain=True)
