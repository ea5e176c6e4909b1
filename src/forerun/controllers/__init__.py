"""Length policies: how far to run ahead. numpy only; one method per file."""

from forerun.controllers.base import Controller, LengthPolicy, State
from forerun.registry import Registry, described

_GOVERNORS = {"auto": "forerun.governors.renewal", "goodput": "forerun.governors.goodput"}
CONTROLLERS = Registry(
    "controller", "forerun.controllers", described("controllers") | _GOVERNORS, Controller
)

__all__ = ["CONTROLLERS", "Controller", "LengthPolicy", "State"]
