"""From a Hugging Face model, or a folder that holds one, to an executor that passed the probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openvino as ov

from forerun.cache import keep_json, kept_json
from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.lazy import threads as count_threads
from forerun.lazy import torch
from forerun.runtime import gguf
from forerun.runtime.base import Facts
from forerun.runtime.load import EXPORTED, checkpoint_files, counted, exported, load_model
from forerun.runtime.openvino import store
from forerun.runtime.openvino.blocks import GROUP, rounds_inputs
from forerun.runtime.openvino.core import reason
from forerun.runtime.openvino.executor import GROUPS, PRECISIONS, OpenVINOExecutor, settings
from forerun.runtime.openvino.making import is_packed
from forerun.runtime.openvino.nodes import TREES, attach, tap
from forerun.runtime.openvino.parts import narrows
from forerun.runtime.openvino.weights import hold
from forerun.runtime.probe import passes_agree, probe, reference, reference_of
from forerun.runtime.states import States
from forerun.runtime.support import refusal
from forerun.runtime.timing import machine

if TYPE_CHECKING:
    from forerun.runtime.encoder_decoder import CrossAttention

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
    settings(precision, threads or count_threads())  # before anything takes long
    if why := refusal(model.config, encoders=True):
        raise UnsupportedModelError(f"{model.config.model_type} cannot run on openvino: {why}")
    called = str(getattr(model, "name_or_path", "") or "")
    loading = _Loading(called, threads, precision, lambda: model, first)
    return loading.executor(store.of_model(model) if cached else None)


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
        files = [path]
        if path.is_dir():
            graph = path / EXPORTED
            files = [graph, graph.with_suffix(".bin"), *path.glob("*config.json")]
        return _Loading(str(path), threads, depths=depths).executor(store.of_files(files))
    precision = precision or "fp32"
    settings(precision, threads or count_threads())

    def torch_model() -> Any:
        return _loaded(name, trust_remote_code)

    model = None if checkpoint_files(name) else torch_model()  # not on this machine until now
    there = torch_model if model is None else lambda: model
    loading = _Loading(str(name), threads, precision, there, depths=depths)
    return loading.executor(store.of_files(checkpoint_files(name)))


def _loaded(name: str | Path, trust_remote_code: bool) -> Any:
    """The torch model, its weights in the mapping of their files where all are in 16 bits; in fp32
    where not, or where it made numbers of its own and rounded them."""
    from forerun.runtime.openvino.export import HALF

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


@dataclass(frozen=True)
class _Loading:
    """An executor on its way: of what model, and how it shall run."""

    name: str
    threads: int | None
    precision: str | None = None  # None: of the weights as they are
    torch_model: Callable[[], Any] | None = None  # None: a GGUF file or an exported model
    first: CrossAttention | None = None
    depths: tuple[int, ...] = ()

    def executor(self, weights: str | None) -> OpenVINOExecutor:
        """It, from the store's entry for weights with this hash, else made and stored there; None:
        not stored."""
        form = "int8" if self.precision == "int8" else "f32"
        if self.precision is None:
            form = "signed, loud channels apart" if rounds_inputs() else "as it is"
        entry = store.key(weights, form) if weights else None
        if entry and (stored := store.read(entry)):
            try:
                return self._proven(stored, entry)
            except UnsupportedModelError:  # damaged where only the probe sees it
                store.discard(entry)
        stored = self._made()
        if not (entry and store.write(entry, stored) and (kept := store.read(entry))):
            return self._proven(stored, None)
        stored = kept  # its weights are pages of a file and no longer memory of their own
        try:
            return self._proven(stored, entry)
        except UnsupportedModelError:
            store.discard(entry)
            raise

    def _made(self) -> store.Stored:
        """The graph, and what it is to be compared with, if torch runs the model."""
        if self.torch_model is None:
            if (path := Path(self.name)).is_dir():
                from forerun.runtime.openvino.exported import graph_of

                return store.Stored(*graph_of(path), None)
            from forerun.runtime.openvino.gguf import graph_of as graph_of_gguf

            file = gguf.read(path)
            return store.Stored(graph_of_gguf(file), file.facts(), None)
        return self._exported(self.torch_model())

    def _exported(self, model: Any) -> store.Stored:
        from forerun.runtime.encoder_decoder import facts_of as sourced_facts
        from forerun.runtime.openvino.export import HALF, Widened, export, halved, in_fp32
        from forerun.runtime.padded import facts_of

        if model.device.type != "cpu" or model.dtype not in HALF:
            model = in_fp32(model)
        with Widened():
            facts = sourced_facts(model) if model.config.is_encoder_decoder else facts_of(model)
            expected = reference(model, facts.limit)
        with halved(model) as memory:
            graph = export(model)
        hold(graph, self.precision == "int8")
        return store.Stored(graph, facts, expected, memory)

    def _proven(self, stored: store.Stored, entry: str | None) -> OpenVINOExecutor:
        """The executor, if it passes the probe."""
        precision = PRECISIONS[self.precision] if self.precision else stored.facts.precision
        facts = replace(stored.facts, executor="openvino", precision=precision, name=self.name)
        graph, width = attach(stored.graph), 0
        known, keep = False, None
        if facts.source_limit is None:
            if self.depths and max(self.depths) <= facts.layers:  # else its draft is refused
                width = tap(graph, self.depths)
            executor, known, keep = self._compiled(graph, facts, entry)
        else:
            executor = self._sourced(graph, facts)
        executor.memory, executor.entry = stored.memory, entry
        executor.settle()  # before passes pack what compiling has read
        expected = stored.reference
        if expected is not None or not known:  # else it would be compared with itself again
            probe(executor, reference_of(executor) if expected is None else expected)
        if keep:
            keep_json("widths", *keep)
        executor.warm()
        if width:
            executor.states = States(self.depths, width)
        executor.settle()
        return executor

    def _sourced(self, graph: ov.Model, facts: Facts) -> OpenVINOExecutor:
        from forerun.runtime.openvino.export import in_fp32
        from forerun.runtime.openvino.sourced import SourcedOpenVINOExecutor

        assert self.torch_model is not None, "only torch models have encoders"

        def beside(draft: Any, first: CrossAttention) -> OpenVINOExecutor:
            return from_model(draft, self.precision or "fp32", self.threads, first=first)

        model = in_fp32(self.torch_model())  # the others hold none while they compile
        return SourcedOpenVINOExecutor(graph, facts, model, beside, self.first, self.threads)

    def _compiled(
        self, graph: ov.Model, facts: Facts, entry: str | None
    ) -> tuple[OpenVINOExecutor, bool, tuple[str, Any] | None]:
        """An executor whose passes compute the same whatever their width. How it gets there depends
        on the machine, takes long to try, and is to be kept once the executor is proven.

        Returns:
            It; whether it was proven at an earlier start; else key and value of what to keep.
        """
        threads = self.threads or count_threads()
        about = [LAZY, entry, facts.precision, threads, machine("cpu")]
        key = sha256(json.dumps(about).encode()).hexdigest()[:32]
        rounds = GROUPS.get(facts.precision, GROUP) > 0 and rounds_inputs()
        tries = [(None, 2, False), (0, 1, False)]  # `group`, `least` and `narrow`
        if not rounds:
            tries.insert(0, (None, 1, False))
        elif narrows(facts.precision):
            names = {name for port in graph.inputs for name in port.get_names()}
            if TREES[0] in names:  # no windows: Gemma 3 would lose 2 % of its best tokens
                tries.insert(0, (None, 2, True))
        kept = kept_json("widths", key) if entry else None
        known = [how for how in tries if [*how] == kept]
        for group, least, narrow in known or tries:
            exact = rounds and group is None  # passes, to the last bit
            lazy = (key if entry else "") if exact and is_packed(facts) else None
            again = partial(_read_again, entry, self.name) if entry else None
            try:
                executor = OpenVINOExecutor(
                    graph, facts, self.threads, group, again, least, lazy, narrow
                )
            except RuntimeError as error:  # OpenVINO has no other
                why = f"OpenVINO cannot compile it: {reason(error)}"
                raise UnsupportedModelError(why) from error
            if known or passes_agree(executor, exact):
                keep = (key, [group, least, narrow]) if entry and not known else None
                return executor, bool(known), keep
        return executor, False, None


def _read_again(entry: str, name: str) -> ov.Model:
    if (stored := store.read(entry)) is None:
        raise ModelError(f"the graph of {name!r} is no longer in {store.folder()}; load it anew")
    return attach(stored.graph)
