"""Length policies in vLLM: `--scheduler-cls forerun.vllm.Scheduler`; drafts without a model.

Nothing of vLLM is imported before its scheduler is made, or its plug-ins are called.
"""

from typing import Any

from forerun.hosts.batch_lengths import logger
from forerun.hosts.vllm_requests import Proposer, setting
from forerun.hosts.vllm_requests import check_requests as register

__all__ = ["Proposer", "Scheduler", "register"]


class Scheduler:
    """What vLLM makes of `scheduler_cls`: its own scheduler, whose lengths forerun decides. Outside
    the tested window of versions, or where variable lengths are not safe, it is vLLM's own as it
    is, and one line of the log says why."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """By this configuration of vLLM; one that records a trace, if it names a file for it."""
        from forerun.hosts import vllm_scheduler as hosted

        scheduler = hosted.scheduler_class(vllm_config)(vllm_config, *args, **kwargs)
        path = setting(vllm_config, "record")
        if path and (reason := hosted.unrecorded(scheduler, vllm_config)):
            logger.warning("forerun: no trace is recorded: %s", reason)
        elif path:
            from forerun.lab.traces.hosted import HostRecorder

            about = hosted.models_of(vllm_config)
            scheduler.recorder = HostRecorder(path, scheduler.num_spec_tokens, about)
        return scheduler
