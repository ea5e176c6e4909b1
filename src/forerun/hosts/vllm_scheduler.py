"""vLLM's scheduler with lengths per request and step; see `forerun.vllm.Scheduler`."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

from prometheus_client import Counter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from forerun.hosts.batch_lengths import BatchLengths, DraftOutcome
from forerun.hosts.vllm_requests import CONTROLLER, differs, unsupported
from forerun.model import DEFAULT_CONTROLLER

logger = logging.getLogger("vllm.forerun")
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def scheduler_class(config: Any) -> type[Any]:
    """The class for a configuration of vLLM: ours, or its own with a line that says why."""
    waits = not config.scheduler_config.async_scheduling
    plain, ours = (SyncScheduler, PolicySyncScheduler) if waits else (
        AsyncScheduler, PolicyAsyncScheduler
    )  # fmt: skip
    if reason := unsupported() or _changed() or _unsafe(config):
        logger.warning("forerun: drafts are as long as vLLM makes them: %s", reason)
        return plain
    return ours


def _changed() -> str | None:
    """Why the scheduler's methods are not those that were tested."""
    hooks = {
        SyncScheduler.schedule: ("self", "throttle_prefills"),
        SyncScheduler.update_draft_token_ids: ("self", "draft_token_ids"),
        SyncScheduler._update_after_schedule: ("self", "scheduler_output"),
        AsyncScheduler._update_after_schedule: ("self", "scheduler_output"),
        SyncScheduler.update_from_output: ("self", "scheduler_output", "model_runner_output"),
    }
    return next((why for hook, names in hooks.items() if (why := differs(hook, *names))), None)


def _unsafe(config: Any) -> str | None:
    """Why lengths must not vary, by the guards that vLLM has for its own variable lengths."""
    if config.speculative_config is None:
        return "no speculative_config is set, so nothing drafts"
    if config.parallel_config.data_parallel_size > 1:
        return "data-parallel ranks would decide differently, and wait for each other for ever"
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.has_full_cudagraphs() and not config.use_v2_model_runner:
        return (
            "full CUDA graphs of the first model runner take drafts of one length; set "
            "cudagraph_mode PIECEWISE, or VLLM_USE_V2_MODEL_RUNNER=1"
        )
    return None


@lru_cache(maxsize=1)
def _counters() -> tuple[Counter, Counter]:
    """Drafted and accepted tokens; made once a process."""
    return (
        Counter("forerun_drafted_tokens", "Drafted tokens that were judged", ["controller"]),
        Counter("forerun_accepted_tokens", "Drafted tokens that were accepted", ["controller"]),
    )


def _guarded(hook: _Hook) -> _Hook:
    """An error of ours leaves vLLM's own lengths in place, from then on, and is logged once."""

    @wraps(hook)
    def run(self: Any, *args: Any) -> Any:
        if self.broken:
            return None
        try:
            return hook(self, *args)
        except Exception:
            self.broken = True
            logger.exception("forerun: drafts are as long as vLLM makes them from now on")
            return None

    return run  # type: ignore[return-value]


class _ScheduledStep(NamedTuple):
    """A step that was scheduled and is not back."""

    output: Any
    judged: dict[str, int]
    """Per request the tokens that its draft, judged now, was to have."""
    context: float
    began: float
    reads: bool
    """Whether it reads a prompt."""


class PolicyHooks:
    """What the synchronous and the asynchronous scheduler have in common.

    A step judges what the last one drafted, and drafts for the next. How far that goes is decided
    when it is scheduled: the longest length of the batch is drafted, and of that every request has
    its own judged. So a decision knows of all rounds but the newest.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broken = False
        self._asked: dict[str, int] = {}
        """Tokens that each request is to draft in the newest step."""
        self._steps: deque[_ScheduledStep] = deque()
        self._began = self._ended = time.perf_counter()
        self._set_up()

    @_guarded
    def _set_up(self) -> None:
        config: Any = self
        extra = config.vllm_config.additional_config
        extra = extra.get("forerun", {}) if isinstance(extra, dict) else {}
        default = extra.get("controller") or os.environ.get("FORERUN_CONTROLLER")
        self.lengths = BatchLengths(default or DEFAULT_CONTROLLER, config.num_spec_tokens)
        logger.info("forerun: %s decides how far drafts run", default or DEFAULT_CONTROLLER)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; the beginning of the step is noted."""
        self._began = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        self._decide(scheduler_output)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self._cut_placeholders(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """As vLLM's, of drafts cut to each request's own length."""
        self._cut(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's; policies learn what became of drafts."""
        self._observe(scheduler_output, model_runner_output)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    @_guarded
    def _decide(self, output: Any) -> None:
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        counts = output.num_scheduled_tokens
        running = {r: requests[r] for r in counts if r in requests}
        judged, left, reads, tokens = {}, {}, False, 0
        for name, request in running.items():
            params = request.sampling_params
            extra = (params.extra_args if params else None) or {}
            self.lengths.join(name, extra.get(CONTROLLER), not (params and params.temperature))
            judged[name] = self._asked.get(name, 0)
            before = request.num_computed_tokens
            reads |= before < request.num_prompt_tokens
            if before + counts[name] >= request.num_prompt_tokens:
                left[name] = max(request.max_tokens - request.num_output_tokens, 1)
            tokens += request.num_tokens
        context = tokens / max(len(running), 1)
        self._steps.append(_ScheduledStep(output, judged, context, self._began, reads))
        self._asked = self.lengths.limits(left, context) if left else {}
        longest = max(self._asked.values(), default=0)
        output.num_spec_tokens_to_schedule = min(output.num_spec_tokens_to_schedule, longest)

    @_guarded
    def _cut(self, drafts: Any) -> None:
        drafts.draft_token_ids = [
            tokens[: self._asked.get(name, 0)]
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]

    @_guarded
    def _cut_placeholders(self, output: Any) -> None:
        """The asynchronous scheduler counts on drafts that are not there yet."""

    @_guarded
    def _observe(self, output: Any, ran: Any) -> None:
        now, ended = time.perf_counter(), self._ended
        self._ended = now
        while self._steps and self._steps[0].output is not output:
            self._steps.popleft()
        if not self._steps:
            return
        step = self._steps.popleft()
        outcomes = {}
        for name, asked in step.judged.items():
            place = ran.req_id_to_index.get(name)
            got = (
                ran.sampled_token_ids[place] if place is not None and ran.sampled_token_ids else ()
            )
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if len(got):
                accepted = min(len(got) - 1, drafted)
                outcomes[name] = DraftOutcome(drafted, accepted, asked)
                if drafted:
                    for counter, count in zip(_counters(), (drafted, accepted), strict=True):
                        counter.labels(self.lengths.name(name)).inc(count)
        seconds = None if step.reads else now - max(step.began, ended)
        drafts = output.num_spec_tokens_to_schedule
        self.lengths.observe(outcomes, step.context, drafts, seconds)
        self.lengths.leave(list(output.finished_req_ids))


class PolicySyncScheduler(PolicyHooks, SyncScheduler):
    """Drafts are there when the next step is scheduled."""


class PolicyAsyncScheduler(PolicyHooks, AsyncScheduler):
    """The next step is scheduled while the drafts that it judges are made."""

    @_guarded
    def _cut_placeholders(self, output: Any) -> None:
        for name in output.num_scheduled_tokens:
            request = self.requests[name]
            if request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[: self._asked.get(name, 0)]
