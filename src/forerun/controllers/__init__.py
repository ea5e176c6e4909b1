"""Length controllers: how far to run ahead. numpy only; one method per file."""

from forerun.controllers.base import LengthController, State
from forerun.registry import Registry

CONTROLLERS = Registry(
    "controller",
    "forerun.controllers",
    {
        "fixed": "forerun.controllers.fixed:FixedLength",
        "hf-heuristic": "forerun.controllers.hf_heuristic:HFHeuristic",
        "hf-threshold": "forerun.controllers.hf_threshold:HFThreshold",
        "gammatune": "forerun.controllers.gammatune:GammaTune",
        "gammatune+": "forerun.controllers.gammatune_plus:GammaTunePlus",
        "bounded": "forerun.controllers.bounded:Bounded",
    },
    LengthController,
)

__all__ = ["CONTROLLERS", "LengthController", "State"]
