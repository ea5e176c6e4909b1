"""Shared fixtures. Tests run on one thread: they share small machines with each other."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from real import LASTING

torch.set_num_threads(1)
NUMBERS = itertools.count()
# Hundreds of tiny models, most for one test: exporting each would take minutes.
os.environ["FORERUN_RUNTIME"] = "torch"
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # see runtime/openvino
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _untimed() -> Iterator[None]:
    """Loading times no passes: that takes 0.3 s, and what a busy machine says of them is another
    `auto` in every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.model._warmed", lambda model: model)
        yield


@pytest.fixture(autouse=True, scope="session")
def _graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exported graphs are kept for all workers, and nothing of the user's is used."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", str(base / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _loaded_once() -> Iterator[None]:
    """Weights that no test changes are read once by each worker: executors only read them."""
    from forerun.runtime import runtimes

    read, kept = runtimes.load_model, dict[Any, Any]()

    def load_model(name: Any, *how: Any, **more: Any) -> Any:
        key = str(name), *how, *more.items()
        if key[0] not in LASTING:
            return read(name, *how, **more)
        if key not in kept:
            kept[key] = read(name, *how, **more)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "load_model", load_model)
        yield


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What targets of tests write is learned in a folder of the test's own."""
    from forerun.drafters import memory

    folder = tmp_path_factory.getbasetemp() / f"memory-{os.getpid()}-{next(NUMBERS)}"
    monkeypatch.setattr(memory, "cache_folder", lambda kind: folder / kind)


@pytest.fixture(autouse=True)
def _without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests find the same models whether it is installed or not."""
    monkeypatch.setattr("forerun.zoo.find_spec", lambda name: None)


@pytest.fixture
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured in fewer and shorter live turns than anybody should trust."""
    from forerun.lab.traces import measuring

    for name, few in (("LIVE_TOKENS", 12), ("LIVE_TURNS", 2)):
        monkeypatch.setattr(measuring, name, few)
