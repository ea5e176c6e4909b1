"""From a Hugging Face model, or a folder that holds one, to an executor that passed the probe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import openvino as ov
import torch

from forerun.cache import keep_json, kept_json
from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.runtime import gguf
from forerun.runtime.base import Facts
from forerun.runtime.encoder_decoder import CrossAttention
from forerun.runtime.encoder_decoder import facts_of as sourced_facts
from forerun.runtime.load import EXPORTED, checkpoint_files, counted, exported, load_model
from forerun.runtime.openvino import store
from forerun.runtime.openvino.blocks import GROUP, rounds_inputs
from forerun.runtime.openvino.executor import GROUPS, PRECISIONS, OpenVINOExecutor, settings
from forerun.runtime.openvino.export import HALF, Widened, export, halved, in_fp32, reason
from forerun.runtime.openvino.forms import is_packed
from forerun.runtime.openvino.nodes import TREES, attach, tap
from forerun.runtime.openvino.parts import narrows
from forerun.runtime.openvino.sourced import SourcedOpenVINOExecutor
from forerun.runtime.openvino.weights import hold
from forerun.runtime.padded import facts_of
from forerun.runtime.probe import passes_agree, probe, reference, reference_of
from forerun.runtime.states import States
from forerun.runtime.support import refusal
from forerun.runtime.timing import machine

CPU = torch.device("cpu")
LAZY = 3  # goes up when what was kept of widths must not be used


def from_model(
    model: Any,
    precision: str = "fp32",
    threads: int | None = None,
    cached: bool = True,
    first: CrossAttention | None = None,
) -> OpenVINOExecutor:
    """An executor for a live model, which it does not keep unless it has an encoder.

    Args:
        model: a Hugging Face model.
        precision: of `PRECISIONS`: "fp32" (cache, too), "bf16" (both) or "int8" (weights; all
            else in fp32).
        threads: None: as many as torch has.
        cached: whether to look for the exported graph on disk, and to leave it there.
        first: that of a target, whose encoder is this model's, too.

    Raises:
        UnsupportedModelError: this model cannot run here; one line says why.
        SettingError: a precision that is unknown or that so few threads cannot run.
    """
    settings(precision, threads or torch.get_num_threads())  # before anything takes long
    if why := refusal(model.config, encoders=True):
        raise UnsupportedModelError(f"{model.config.model_type} cannot run on openvino: {why}")
    entry = store.key(store.of_model(model), _form(precision)) if cached else None
    called = str(getattr(model, "name_or_path", "") or "")
    options = _Options(precision, threads, first)
    return _made(entry, lambda: _export(model, options), called, options, lambda: model)


def from_name(
    name: str | Path,
    precision: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    depths: tuple[int, ...] = (),
) -> OpenVINOExecutor:
    """An executor for a model on disk or on the Hugging Face hub.

    Its torch weights are loaded only if its graph is not in the store, and are given back then.

    Args:
        name: a folder, a Hugging Face id, or a GGUF file (`gguf.locate`).
        precision: as for `from_model`; None: "fp32", or what a GGUF file or exported model has.
        threads: as for `from_model`.
        trust_remote_code: run code that comes with the model.
        depths: whose states it shall leave (`tap`); not of one with an encoder.

    Raises:
        ModelError: missing, corrupt, or no causal language model.
        UnsupportedModelError, SettingError: as for `from_model`.
    """
    if path := gguf.locate(name) or exported(name):
        if precision is not None:
            raise SettingError(
                f"{path.name} is run in the precision of its weights, got precision="
                f"{precision!r}; leave it out"
            )
        return _as_it_is(path, _Options(None, threads, depths=depths))
    precision = precision or "fp32"
    settings(precision, threads or torch.get_num_threads())
    options = _Options(precision, threads, depths=depths)

    def torch_model() -> Any:
        return _loaded(name, trust_remote_code)

    model = None if checkpoint_files(name) else torch_model()  # not on this machine until now
    entry = store.key(store.of_files(checkpoint_files(name)), _form(precision))
    there = torch_model if model is None else lambda: model
    return _made(entry, lambda: _export(there(), options), str(name), options, there)


def _loaded(name: str | Path, trust_remote_code: bool) -> Any:
    """The torch model, its weights in the mapping of their files where all are in 16 bits; in fp32
    where not, or where it made numbers of its own and rounded them."""
    kinds: dict[str, int] = {}
    with suppress(ModelError):  # loading says what is wrong
        kinds = counted([path for path in checkpoint_files(name) if path.suffix == ".safetensors"])
    if dtype := {"BF16": torch.bfloat16, "F16": torch.float16}.get("".join(kinds)):
        model = load_model(name, "cpu", dtype, trust_remote_code, mapped=True)
        made = dict(model.named_buffers())
        rounded = any(made[name].dtype in HALF for name in made.keys() - model.state_dict().keys())
        if not rounded and not model._keys_to_ignore_on_save:
            return model
    return load_model(name, "cpu", "fp32", trust_remote_code)


def _as_it_is(path: Path, options: _Options) -> OpenVINOExecutor:
    """An executor for a GGUF file or a folder of an exported model, in its own precision."""
    if path.is_dir():
        parts = [path / EXPORTED, (path / EXPORTED).with_suffix(".bin")]
        parts += path.glob("*config.json")
    else:
        parts = [path]

    def make() -> store.Stored:
        if path.is_dir():
            from forerun.runtime.openvino.exported import graph_of

            return store.Stored(*graph_of(path), None)
        from forerun.runtime.openvino.gguf import graph_of as graph_of_gguf

        file = gguf.read(path)
        return store.Stored(graph_of_gguf(file), replace(file.facts(), executor="openvino"), None)

    form = "signed, loud channels apart" if rounds_inputs() else "as it is"
    return _made(store.key(store.of_files(parts), form), make, str(path), options)


@dataclass(frozen=True)
class _Options:
    precision: str | None  # none: of the weights as they are
    threads: int | None
    first: CrossAttention | None = None
    depths: tuple[int, ...] = ()


def _made(
    entry: str | None,
    make: Callable[[], store.Stored],
    name: str,
    options: _Options,
    torch_model: Callable[[], Any] | None = None,
) -> OpenVINOExecutor:
    """An executor from the store, else from what is made, which is then stored."""
    if entry and (stored := store.read(entry)):
        try:
            return _executor(stored, entry, name, options, torch_model)
        except UnsupportedModelError:  # damaged where only the probe sees it
            store.discard(entry)
    stored = make()
    if not (entry and store.write(entry, stored) and (kept := store.read(entry))):
        return _executor(stored, None, name, options, torch_model)
    stored = kept  # its weights are pages of a file and no longer memory of their own
    try:
        return _executor(stored, entry, name, options, torch_model)
    except UnsupportedModelError:
        store.discard(entry)
        raise


@dataclass(frozen=True)
class _Way:
    """How an executor's passes compute the same."""

    proven: bool  # at an earlier start
    key: str | None = None  # by which it is kept
    widths: Sequence[int | None] = ()  # `group`, `least` and `narrow`


def _compiled(
    graph: ov.Model,
    facts: Facts,
    threads: int | None,
    entry: str | None,
    again: Callable[[], ov.Model],
) -> tuple[OpenVINOExecutor, _Way]:
    """An executor whose passes compute the same whatever their width. How it gets there depends on
    the machine, takes long to try, and is to be kept once the executor is proven."""
    about = [LAZY, entry, facts.precision, threads or torch.get_num_threads(), machine(CPU)]
    key = sha256(json.dumps(about).encode()).hexdigest()[:32]
    known = kept_json("widths", key) if entry else None
    rounds = GROUPS.get(facts.precision, GROUP) > 0 and rounds_inputs()
    tries = [(None, 2, False), (0, 1, False)]
    if not rounds:
        tries.insert(0, (None, 1, False))
    elif narrows(facts.precision):
        names = {name for port in graph.inputs for name in port.get_names()}
        if TREES[0] in names:  # no windows: Gemma 3 would lose 2 % of its best tokens
            tries.insert(0, (None, 2, True))
    for group, least, narrow in [known] if known else tries:
        exact = rounds and group is None  # passes, to the last bit
        lazy = (key if entry else "") if exact and is_packed(facts) else None
        try:
            executor = OpenVINOExecutor(
                graph, facts, threads, group, again if entry else None, least, lazy, narrow
            )
        except RuntimeError as error:  # OpenVINO has no other
            raise UnsupportedModelError(f"OpenVINO cannot compile it: {reason(error)}") from error
        if known:
            return executor, _Way(True)
        if passes_agree(executor, exact):
            return executor, _Way(False, key if entry else None, [group, least, narrow])
    return executor, _Way(False)


def _form(precision: str | None) -> str:
    return "int8" if precision == "int8" else "f32"


def _export(model: Any, options: _Options) -> store.Stored:
    if model.device.type != "cpu" or model.dtype not in HALF:
        model = in_fp32(model)
    with Widened():
        facts = sourced_facts(model) if model.config.is_encoder_decoder else facts_of(model)
        expected = reference(model, facts.limit)
    with halved(model) as memory:
        graph = export(model)
    hold(graph, options.precision == "int8")
    return store.Stored(graph, replace(facts, executor="openvino"), expected, memory)


def _executor(
    stored: store.Stored,
    entry: str | None,
    name: str,
    options: _Options,
    torch_model: Callable[[], Any] | None,
) -> OpenVINOExecutor:
    precision = PRECISIONS[options.precision] if options.precision else stored.facts.precision
    facts = replace(stored.facts, precision=precision, name=name)

    def again() -> ov.Model:
        stored_again = store.read(entry) if entry else None
        if stored_again is None:
            raise ModelError(
                f"the graph of {name!r} is no longer in {store.folder()}; load it anew"
            )
        return attach(stored_again.graph)

    graph, width = attach(stored.graph), 0
    way = _Way(False)
    if facts.source_limit is None:
        if options.depths:
            width = tap(graph, options.depths)
        executor, way = _compiled(graph, facts, options.threads, entry, again)
    else:
        assert torch_model is not None, "only torch models have encoders"
        executor = SourcedOpenVINOExecutor(
            graph,
            facts,
            in_fp32(torch_model()),  # the others hold none while they compile
            lambda draft, first: from_model(
                draft, options.precision or "fp32", options.threads, first=first
            ),
            options.first,
            options.threads,
        )
    executor.memory, executor.entry = stored.memory, entry
    executor.settle()  # before passes pack what compiling has read
    expected = stored.reference
    if expected is not None or not way.proven:  # else it would be compared with itself again
        probe(executor, reference_of(executor) if expected is None else expected)
    if way.key:
        keep_json("widths", way.key, way.widths)
    executor.warm()
    if width:
        executor.states = States(options.depths, width)
    executor.settle()
    return executor
