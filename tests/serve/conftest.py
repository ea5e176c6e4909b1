"""Servers for the tests: the shipped pair, and a scripted model that can be held."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import httpx2

import forerun
from forerun.drafters.model import ModelDrafter
from forerun.serve.app import Server
from forerun.serve.config import Config
from forerun.serve.run import Listener, bind
from forerun.testing import ScriptedModel

VOCAB = 16


@dataclass
class Running:
    """A server that listens, and a client for it."""

    url: str
    server: Server
    listener: Listener
    http: httpx2.Client

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All frames of a stream but the last, which is checked."""
        answer = self.post(path, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        frames = answer.text.strip().split("\n\n")
        assert frames[-1] == "data: [DONE]"
        return [json.loads(f.removeprefix("data: ")) for f in frames[:-1] if f[0] != ":"]

    def idle(self) -> bool:
        worker = self.server.worker
        return worker.running == worker.waiting == 0 and not worker._given

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the exposition; 0 if it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        total = 0.0
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"forerun:{name}" and labels.items() <= sample.labels.items():
                    total += sample.value
        return total


def eventually(true: Any, seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def running(model: forerun.Model, **config: Any) -> Iterator[Running]:
    made = Config(**{"port": 0, "grace": 0.0} | config)
    with bind(made) as listening:
        listener = Listener(model, made)
        thread = threading.Thread(target=listener.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            eventually(lambda: listener.started)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx2.Client(base_url=url, timeout=60) as http:
                yield Running(url, listener.forerun, listener, http)
        finally:
            listener.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


class Held(ScriptedModel):
    """After token t comes t + 1; every pass waits until the gate is open."""

    def __init__(self) -> None:
        super().__init__(torch.eye(VOCAB).roll(1, dims=1) * 9, limit=4096)
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Exception | None = None

    def run(self, *args: Any, **more: Any) -> torch.Tensor:
        assert self.gate.wait(20)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        return super().run(*args, **more)


@pytest.fixture
def held() -> Iterator[tuple[Running, Held]]:
    """One row, two may wait."""
    target = Held()
    model = forerun.Model(target, ModelDrafter(ScriptedModel(target._script), VOCAB))
    with running(model, max_rows=1, queue=2, controller="fixed(3)") as server:
        yield server, target
        target.gate.set()


@pytest.fixture(scope="session")
def pair() -> forerun.Model:
    return forerun.load(runtime="openvino")


@pytest.fixture(scope="session")
def shipped(pair: forerun.Model) -> Iterator[Running]:
    """The shipped pair; the rule ears is allowed."""
    with running(pair, max_rows=4, allowed_rules=frozenset({"ears", "budget"})) as server:
        yield server
