"""Length policies: how far to run ahead. numpy only; one method per file."""

from forerun.controllers.base import Controller, LengthPolicy, State
from forerun.registry import Registry

CONTROLLERS = Registry(
    "controller",
    "forerun.controllers",
    {
        "auto": "forerun.governors.renewal:Renewal",
        "fixed": "forerun.controllers.fixed:FixedLength",
        "hf-heuristic": "forerun.controllers.hf_heuristic:HFHeuristic",
        "hf-threshold": "forerun.controllers.hf_threshold:HFThreshold",
        "gammatune": "forerun.controllers.gammatune:GammaTune",
        "gammatune+": "forerun.controllers.gammatune_plus:GammaTunePlus",
        "goodput": "forerun.governors.goodput:Goodput",
        "survival": "forerun.controllers.survival:Survival",
        "calibrated": "forerun.controllers.calibrated:Calibrated",
        "bandit": "forerun.controllers.bandit:Bandit",
        "svip": "forerun.controllers.svip:SVIP",
        "adaedl": "forerun.controllers.adaedl:AdaEDL",
        "exllama-ema": "forerun.controllers.exllama_ema:ExLlamaEMA",
        "exllama-confidence": "forerun.controllers.exllama_confidence:ExLlamaConfidence",
        "sglang-ema": "forerun.controllers.sglang_ema:SGLangEMA",
        "cm-asd": "forerun.controllers.cm_asd:CMASD",
        "bounded": "forerun.controllers.bounded:Bounded",
    },
    Controller,
)

__all__ = ["CONTROLLERS", "Controller", "LengthPolicy", "State"]
