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
    """The class for a configuration: ours, or vLLM's own with a line that says why."""
    asynchronous = config.scheduler_config.async_scheduling
    plain = AsyncScheduler if asynchronous else SyncScheduler
    ours = PolicyAsyncScheduler if asynchronous else PolicySyncScheduler
    hooks = (n for n in vars(PolicyHooks) if hasattr(plain, n) and not n.startswith("__"))
    changed = (why for n in hooks if (why := differs(getattr(plain, n), getattr(ours, n))))
    if reason := unsupported() or next(changed, None) or _unsafe(config):
        logger.warning("forerun: drafts are as long as vLLM makes them: %s", reason)
        return plain
    return ours


def _unsafe(config: Any) -> str | None:
    """Why lengths must not vary, as vLLM's own guards have it."""
    if config.speculative_config is None:
        return "no speculative_config is set, so nothing drafts"
    if config.parallel_config.data_parallel_size > 1:
        return "data-parallel ranks would decide differently, and wait for each other for ever"
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.has_full_cudagraphs() and not config.use_v2_model_runner:
        way = "set cudagraph_mode PIECEWISE, or VLLM_USE_V2_MODEL_RUNNER=1"
        return f"full CUDA graphs of the first model runner take drafts of one length; {way}"
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
    draft, drafter = config.speculative_config, None
    if draft.use_ngram():
        drafter = f"lookup(n={draft.prompt_lookup_max},least={draft.prompt_lookup_min})"
    elif draft.method == "custom_class":
        drafter = setting(config, "draft") or DEFAULT_DRAFT
    names = {"target": {"name": config.model_config.model}, "draft": {"name": draft.model}}
    return names | {"versions": {"vllm": version}} | ({"drafter": drafter} if drafter else {})


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
        self._asked: dict[str, int] = {}  # tokens that each request is to draft in its newest step
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
        output, counts = scheduler_output, scheduler_output.num_scheduled_tokens
        requests = {name: self.requests[name] for name in counts}
        left = {}
        for name, request in requests.items():
            params = request.sampling_params
            spec = None if self.recorder else (params.extra_args or {}).get(CONTROLLER)
            self.lengths.join(name, spec, not params.temperature)
            if request.num_computed_tokens + counts[name] >= request.num_prompt_tokens:
                left[name] = max(request.max_tokens - request.num_output_tokens, 1)
        reads = any(r.num_computed_tokens < r.num_prompt_tokens for r in requests.values())
        context = sum(r.num_tokens for r in requests.values()) / max(len(requests), 1)
        judged = {name: self._asked.get(name, 0) for name in counts}
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
        places, sampled, outcomes = ran.req_id_to_index, ran.sampled_token_ids, {}
        for name in judged.keys() & self.requests.keys() & places.keys():
            if not (tokens := len(sampled[places[name]]) if sampled else 0):
                continue
            # vLLM pads a first step, of which nothing was asked.
            asked, made = judged[name], output.scheduled_spec_decode_tokens.get(name, ())
            drafted = min(len(made), asked)
            accepted = min(tokens - 1, drafted)
            outcomes[name] = judged_round(drafted, accepted, asked)
            if drafted:
                spec = self.lengths.names.get(name, "")
                DRAFTED.labels(spec).inc(drafted)
                ACCEPTED.labels(spec).inc(accepted)
        seconds, drafts = now - max(began, ended), output.num_spec_tokens_to_schedule
        self.lengths.observe(outcomes, context, drafts, None if reads else seconds)
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
