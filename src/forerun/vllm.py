"""Length policies in vLLM: `--scheduler-cls forerun.vllm.Scheduler`.

Nothing of vLLM is imported before its scheduler is made, or its plug-ins are called.
"""

from __future__ import annotations

from typing import Any

from forerun.hosts.vllm_requests import check_requests as register

__all__ = ["Scheduler", "register"]


class Scheduler:
    """What vLLM makes of `scheduler_cls`: its own scheduler, whose lengths forerun decides. Outside
    the tested window of versions, or where variable lengths are not safe, it is vLLM's own as it
    is, and one line of the log says why."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler for this configuration, synchronous or not."""
        from forerun.hosts.vllm_scheduler import scheduler_class

        return scheduler_class(vllm_config)(vllm_config, *args, **kwargs)
