"""Inputs of `forerun bench`: prompts, methods, peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.shared.console import status
from forerun.errors import SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job, Models
    from forerun.lab.bench.methods import Method
    from forerun.lab.bench.peers import Command, Peer
    from forerun.prompts import Prompt


def split_names(text: str, mark: str) -> list[str]:
    """Parts between marks that stand outside brackets."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == mark and depth <= 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    return list(dict.fromkeys(p.strip() for p in (*parts, part) if p.strip()))


def read_sizes(text: str) -> list[int]:
    """Batch sizes like ``1,4,16``."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise SettingError(f"--batch wants sizes like 1,4,16, got {text!r}")
    return sorted({int(size) for size in text.split(",")})


def read_peers(names: str, pythons: Sequence[str], commands: Sequence[str]) -> list[Command]:
    """How the peers are started: those with a name of the repository's, and commands."""
    from forerun.lab.bench.peers import Command, named

    paths = {}
    for pair in pythons:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise SettingError(f"--peer-python wants PEER=PATH like vllm=/path, got {pair!r}")
        paths[name] = path
    short = [command for name in split_names(names, ",") for command in named(name, paths)]
    return short + [Command.read(text) for text in commands]


def bench_prompts(
    families: str,
    prompt_file: str | None,
    split: str,
    limit: int,
    cap: int,
    target: str | None = None,
) -> list[Prompt]:
    """The prompts, checked before a model is loaded."""
    from forerun.prompts import find_prompts
    from forerun.zoo import SOURCES
    from forerun.zoo import families as shipped

    own = None if prompt_file is None else find_prompts(prompt_file, split, limit, cap)
    builtin = [SOURCES[target]] if target in SOURCES else list(shipped())
    present = builtin if own is None else list(dict.fromkeys(str(p.family) for p in own))
    names = present if families.strip() == "all" else split_names(families, ",")
    require(len(names) > 0, "families", families, "names with commas between, or all")
    for name in names:
        if name not in present:
            kind = "family of shipped prompts" if own is None else f"family in {prompt_file}"
            raise UnknownNameError.among(kind, name, ("all", *present))
    if own is not None:
        return [p for p in own if p.family in names]
    return [p for name in names for p in find_prompts(f"builtin:{name}", split, limit, cap)]


@dataclass(frozen=True)
class Compared:
    """The methods compared, by their specs, and the temperature."""

    controllers: list[str]
    rules: list[str]
    peers: list[Command]
    temperature: float

    @classmethod
    def read(cls, controllers: str, rules: str, peers: list[Command], heat: float) -> Compared:
        """From options; a wrong spec or temperature is refused before a model is loaded."""
        from forerun.controllers import CONTROLLERS
        from forerun.engine import Sampling
        from forerun.rules import RULES

        lengths, keeps = split_names(controllers, ";"), split_names(rules, ";")
        require(len(lengths) > 0, "controllers", "", "at least one")
        require(len(keeps) > 0, "rules", "", "at least one")
        for spec in lengths:
            CONTROLLERS.make(spec)
        for spec in keeps:
            RULES.make(spec)
        Sampling(temperature=heat)
        return cls(lengths, keeps, peers, heat)

    def to_json(self) -> dict[str, Any]:
        peers = list(dict.fromkeys(command.label for command in self.peers))
        return {"controllers": self.controllers, "rules": self.rules, "peers": peers}


def make_tasks(prompts: Sequence[Prompt], seed: int, compared: Compared) -> list[Prompt]:
    """The prompts as all methods take them; sampled texts get seeds of their own.

    Of a prompt's settings only two count. Where a rule tosses coins, texts go on after their end,
    so that all are of one length.
    """
    from forerun.requests import Sampling
    from forerun.rules import RULES

    heat = compared.temperature
    longer = heat > 0 and not all(RULES.make(rule).gumbel_max for rule in compared.rules)

    def sampling(i: int, own: Sampling) -> Sampling:
        return Sampling(
            max_new_tokens=own.max_new_tokens, repetition_penalty=own.repetition_penalty,
            temperature=heat, ignore_eos=longer, seed=seed + i,
        )  # fmt: skip

    return [replace(p, sampling=sampling(i, p.sampling)) for i, p in enumerate(prompts)]


def our_methods(job: Job, compared: Compared) -> list[Method]:
    """Plain decoding, and every controller with every rule."""
    from forerun.lab.bench.methods import PLAIN, Ours

    sampled = compared.temperature > 0
    out: list[Method] = [Ours(PLAIN, job.model)]
    for rule in compared.rules:
        for spec in compared.controllers:
            name = spec if rule == "gumbel" else f"{spec} + {rule}"
            out.append(Ours(name, job.model, spec, rule, sampled))
    return out


def start_peers(
    stack: ExitStack, job: Job, models: Models, commands: Sequence[Command]
) -> tuple[list[Peer], list[dict[str, str]]]:
    """Peers that can run here, closed with the stack, and the others with the reason."""
    from forerun.lab.bench.peers import Peer, opening

    peers, skipped = [], []
    first = opening(job.model, *_model_paths(job, models))
    for command in commands:
        peer = Peer(command, first)
        stack.callback(peer.close)
        with status(f"starting {peer.name}"):
            reason = peer.start()
        if reason is None:
            peers.append(peer)
        else:
            skipped.append({"name": command.label, "reason": reason})
    return peers, skipped


def _model_paths(job: Job, models: Models) -> tuple[str, str | None]:
    """Where a peer finds the target, and the draft model if the drafter is one."""
    from forerun import zoo
    from forerun.drafters.model import ModelDrafter

    small = models.draft or (str(zoo.DRAFT) if models.target is None else None)
    target = str(zoo.locate(models.target))
    return target, small if isinstance(job.model.drafter, ModelDrafter) else None


def draft_identity(job: Job) -> Any:
    """Name and hash of the draft model, or the drafter's spec."""
    from forerun.drafters.model import ModelDrafter
    from forerun.lab.provenance import identity

    drafter = job.model.drafter
    return identity(drafter.rows) if isinstance(drafter, ModelDrafter) else job.about["draft"]


def model_name(model: str) -> str:
    """The name without its path on this machine."""
    return Path(model).name if Path(model).is_dir() else model
