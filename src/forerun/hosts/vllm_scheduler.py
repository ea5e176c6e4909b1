"""vLLM's scheduler with lengths per request and step; see `forerun.vllm.Scheduler`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

from prometheus_client import Counter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.version import __version__ as version

from forerun.hosts.batch_lengths import BatchLengths, judged_round, logger
from forerun.hosts.vllm_requests import CONTROLLER, DEFAULT_DRAFT, differs, setting, unsupported
from forerun.model import DEFAULT_CONTROLLER

DRAFTED = Counter("forerun_drafted_tokens", "Drafted tokens that were judged", ["controller"])
ACCEPTED = Counter("forerun_accepted_tokens", "Drafted tokens that were accepted", ["controller"])


def scheduler_class(config: Any) -> type[Any]:
    """The class for a configuration of vLLM: ours, or its own with a line that says why."""
    plain, ours = SyncScheduler, PolicySyncScheduler
    if config.scheduler_config.async_scheduling:
        plain, ours = AsyncScheduler, PolicyAsyncScheduler
    hooks = (n for n in vars(PolicyHooks) if hasattr(plain, n) and not n.startswith("__"))
    changed = (why for n in hooks if (why := differs(getattr(plain, n), getattr(ours, n))))
    if reason := unsupported() or next(changed, None) or _unsafe(config):
        logger.warning("forerun: drafts are as long as vLLM makes them: %s", reason)
        return plain
    return ours


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


def unrecorded(scheduler: Any, config: Any) -> str | None:
    """Why a scheduler cannot record a trace; None if it can."""
    if not isinstance(scheduler, PolicySyncScheduler):
        return "drafts are seen by the synchronous scheduler alone; give --no-async-scheduling"
    if config.speculative_config.draft_sample_method != "greedy":
        return "a draft that is drawn is not the one that comes again; draft_sample_method: greedy"
    return None


def models_of(config: Any) -> dict[str, Any]:
    """Who target and draft are, as a trace has it."""
    draft, about = config.speculative_config, dict[str, Any](versions={"vllm": version})
    about |= {"target": {"name": config.model_config.model}, "draft": {"name": draft.model}}
    if draft.use_ngram():
        least, most = draft.prompt_lookup_min, draft.prompt_lookup_max
        about["drafter"] = f"lookup(n={most},least={least})"
    elif draft.method == "custom_class":
        about["drafter"] = setting(config, "draft") or DEFAULT_DRAFT
    return about


def _before(hook: Callable[..., None]) -> Callable[..., Any]:
    """vLLM's method of the name of a hook that runs before it, and names its parameters as the vLLM
    that was tested. An error of ours is logged once, and no hook runs from then on."""

    @wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if not self.broken:
                hook(self, *args, **kwargs)
        except Exception:
            self.broken = True
            logger.exception("forerun: drafts are as long as vLLM makes them from now on")
        return getattr(super(PolicyHooks, self), hook.__name__)(*args, **kwargs)

    return run


class PolicyHooks:
    """What the synchronous and the asynchronous scheduler have in common.

    A step judges what the last one drafted, and drafts for the next. How far that goes is decided
    when it is scheduled: the longest length of the batch is drafted, and of that every request has
    its own judged. So a decision knows of all rounds but the newest.
    """

    recorder: Any = None
    """With a `HostRecorder`, as much as can be is drafted before every token, and none judged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broken = False
        self._asked: dict[str, int] = {}
        """Tokens that each request is to draft in its newest step."""
        self._began = self._ended = time.perf_counter()

    @cached_property
    def lengths(self: Any) -> BatchLengths:
        """By the default controller, all that a trace wants or what the configuration names."""
        named = setting(self.vllm_config, "controller") or DEFAULT_CONTROLLER
        default = f"fixed({self.num_spec_tokens})" if self.recorder else named
        logger.info("forerun: %s decides how far drafts run", default)
        return BatchLengths(default, self.num_spec_tokens)

    @_before
    def schedule(self: Any, throttle_prefills: bool = False) -> None:
        """Of its draft, of which the asynchronous scheduler has but the places, every request has
        its own length judged."""
        self._began = time.perf_counter()
        for request in self.running:
            name, draft = request.request_id, request.spec_token_ids
            if self.recorder is not None and draft:
                self.recorder.add(name, request.num_output_tokens, draft)
            request.spec_token_ids = draft[: 0 if self.recorder else self._asked.get(name, 0)]

    @_before
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        output, reads, tokens = scheduler_output, False, 0
        counts, judged, left = output.num_scheduled_tokens, dict[str, int](), dict[str, int]()
        for name, count in counts.items():
            request = self.requests[name]
            params = request.sampling_params
            spec = None if self.recorder else (params.extra_args or {}).get(CONTROLLER)
            self.lengths.join(name, spec, not params.temperature)
            judged[name] = self._asked.get(name, 0)
            before = request.num_computed_tokens
            reads |= before < request.num_prompt_tokens
            if before + count >= request.num_prompt_tokens:
                left[name] = max(request.max_tokens - request.num_output_tokens, 1)
            tokens += request.num_tokens
        context = tokens / max(len(counts), 1)
        output.forerun = judged, context, self._began, reads
        limits = self.lengths.limits(left, context) if left else {}
        # With pipeline parallel stages others are under way: theirs stay.
        self._asked |= dict.fromkeys(counts, 0) | limits
        longest = max(limits.values(), default=0)
        output.num_spec_tokens_to_schedule = min(output.num_spec_tokens_to_schedule, longest)

    @_before
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        """Policies learn what became of drafts."""
        output, ran, ended = scheduler_output, model_runner_output, self._ended
        self._ended = now = time.perf_counter()
        judged, context, began, reads = output.forerun
        outcomes = {}
        for name, asked in judged.items():
            place = ran.req_id_to_index.get(name) if name in self.requests else None
            if place is None or not ran.sampled_token_ids or not len(ran.sampled_token_ids[place]):
                continue
            # vLLM pads a first step, of which nothing was asked.
            drafted = min(len(output.scheduled_spec_decode_tokens.get(name, ())), asked)
            accepted = min(len(ran.sampled_token_ids[place]) - 1, drafted)
            outcomes[name] = judged_round(drafted, accepted, asked)
            if drafted:
                spec = self.lengths.names.get(name, "")
                DRAFTED.labels(spec).inc(drafted)
                ACCEPTED.labels(spec).inc(accepted)
        seconds = None if reads else now - max(began, ended)
        drafts = output.num_spec_tokens_to_schedule
        self.lengths.observe(outcomes, context, drafts, seconds)
        self.lengths.leave(output.finished_req_ids)
        for name in output.finished_req_ids:
            self._asked.pop(name, None)

    @_before
    def _free_request(self: Any, request: Any, delay_free_blocks: bool = False) -> None:
        """A text that is recorded has ended."""
        if self.recorder is not None:
            room = self.max_model_len - request.num_prompt_tokens
            counts = request.num_prompt_tokens, min(request.max_tokens, room)
            self.recorder.end(request.request_id, list(request.output_token_ids), counts)

    @_before
    def shutdown(self: Any) -> None:
        """What is recorded is written."""
        if self.recorder is not None:
            self.recorder.write()


class PolicySyncScheduler(PolicyHooks, SyncScheduler):
    """Drafts are there when the next step is scheduled."""


class PolicyAsyncScheduler(PolicyHooks, AsyncScheduler):
    """The next step is scheduled while the drafts that it judges are made: it counts on as many."""
