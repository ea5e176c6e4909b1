"""Keys, sizes, names."""

from __future__ import annotations

import socket
import time

import httpx2
import pytest
import torch

import forerun
from forerun.checks import size
from forerun.drafters.none import NullDrafter
from forerun.errors import SettingError
from forerun.serve import guards, run
from forerun.serve.config import Config
from forerun.serve.run import bind, loading, warm_up
from forerun.testing import ScriptedModel
from serve.conftest import VOCAB, Held, running

GOOD = {"prompt": [3], "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded():
    config = {
        "api_keys": ("first", "zweiter-schlüssel"),
        "max_body": 2000,
        "max_tokens": 5,
        "origins": ("https://ui.example",),
        "hosts": ("model.example",),
    }
    from forerun.drafters.none import NoDraft

    with running(forerun.Model(Held(), NoDraft().build(None, None)), **config) as server:
        yield server


def bearer(key):
    return {"authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer"}, 401),
        (bearer("firs"), 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        (bearer("first"), 200),
        (bearer("zweiter-schlüssel"), 200),
    ],
)
def test_requests_need_a_key(guarded, headers, status):
    answer = guarded.http.post("/v1/completions", json=GOOD, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_what_is_open_and_what_is_not(guarded):
    for path in ("/", "/health", "/version", "/metrics", "/openapi.json"):
        assert guarded.http.get(path).status_code == 200
    for path in ("/v1/models", "/forerun/parts", "/tokenizer_info", "/nothing"):
        assert guarded.http.get(path).status_code == 401


def test_large_bodies_are_not_read(guarded):
    def chunks():
        for _ in range(5):
            yield b" " * 1000

    for content in (b" " * 3000, chunks()):
        answer = guarded.http.post("/v1/completions", content=content, headers=bearer("first"))
        assert answer.status_code == 413
        assert "2000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("[::1]", 200),
        ("MODEL.example", 200),
        ("evil.example", 403),
        ("[", 403),
    ],
)
def test_other_names_are_refused_on_loopback(guarded, host, status):
    assert guarded.http.get("/health", headers={"host": host}).status_code == status


def test_pages_of_other_origins_only_where_allowed(guarded):
    for origin, allowed in [("https://ui.example", True), ("https://other.example", False)]:
        answer = guarded.http.get("/health", headers={"origin": origin})
        assert ("access-control-allow-origin" in answer.headers) is allowed


def test_the_operators_limit_of_tokens(guarded):
    asked = guarded.http.post(
        "/v1/completions", json=GOOD | {"max_tokens": 6}, headers=bearer("first")
    )
    assert asked.status_code == 400
    assert "at most 5" in asked.json()["error"]["message"]
    rest = {name: value for name, value in GOOD.items() if name != "max_tokens"}
    default = guarded.http.post("/v1/completions", json=rest, headers=bearer("first")).json()
    assert default["usage"]["completion_tokens"] == 5


def test_text_without_a_tokenizer_is_refused(guarded):
    answer = guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=bearer("first"))
    assert answer.status_code == 400
    assert "token ids" in answer.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    answer = guarded.http.post("/v1/chat/completions", json=chat, headers=bearer("first"))
    assert answer.status_code == 400
    assert "template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"port": 70000}, "port"),
        ({"max_rows": 0}, "max rows"),
        ({"queue": -1}, "queue"),
        ({"metrics_prefix": "a b"}, "prefix"),
        ({"api_keys": ("",)}, "api key"),
        ({"grace": -1}, "grace"),
    ],
)
def test_settings_out_of_range(setting, word):
    with pytest.raises(SettingError, match=word):
        Config(**setting)


@pytest.mark.parametrize("text", ["", "GB", "8 apples", "-1"])
def test_sizes_that_are_none(text):
    with pytest.raises(SettingError, match="size"):
        size(text)


def test_what_is_written_goes_at_once():
    with bind(Config(port=0)) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def half(server, *parts: bytes) -> bytes:
    """All that comes back on a connection that sent only so much, until it is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        for data in parts:
            client.sendall(data)
            time.sleep(0.1)
        out = b""
        while part := client.recv(1 << 16):
            out += part
        return out


BODY = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"


def test_half_a_head_and_half_a_body_have_a_deadline(monkeypatch):
    for bounded in (guards, run):
        monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    model = forerun.Model(ScriptedModel(torch.eye(VOCAB)), NullDrafter())
    with running(model) as server:
        assert half(server, b"") == b""
        assert half(server, b"POST /v1/comp") == b""
        whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert half(server, whole, b"GET /he").count(b"200 OK") == 1
        late = half(server, BODY)
        assert late.startswith(b"HTTP/1.1 408")
        assert b"0.3 s" in late


def test_connections_have_a_limit(monkeypatch):
    monkeypatch.setattr(run, "CONNECTIONS", 2)
    model = forerun.Model(ScriptedModel(torch.eye(VOCAB)), NullDrafter())
    with running(model) as server:
        host, port = server.url.removeprefix("http://").split(":")
        kept = [socket.create_connection((host, int(port))) for _ in range(2)]
        time.sleep(0.1)
        assert b" 503 " in half(server, b"")
        for client in kept:
            client.close()
        time.sleep(0.1)
        assert server.http.get("/health").status_code == 200


def test_head_and_paths_without_v1(guarded):
    head = guarded.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert guarded.http.get("/models").status_code == 401
    assert guarded.http.get("/models", headers=bearer("first")).status_code == 200


def test_a_model_that_is_being_loaded_is_said_to_be():
    """The port is bound first; then every path says 503, and when all is there, the server."""
    with bind(Config(port=0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with loading(listening):
            for _ in range(2):
                answer = httpx2.get(f"{url}/health")
                assert answer.status_code == 503
                assert "loaded" in answer.json()["error"]["message"]


def test_each_size_of_batch_is_timed_by_itself(pair, monkeypatch):
    """What single rows take leaves no time for others in a first start."""
    sizes: list[int] = []
    monkeypatch.setattr(type(pair.meter), "warm", lambda _, rows=1: sizes.append(rows))
    warm_up(pair, 6)
    assert [size for size in sizes if size > 1][:3] == [2, 4, 6]


def test_warming_up_leaves_no_trace(pair):
    warm_up(pair, 3)
    assert pair.target.lengths == []
    assert pair.generate("Once upon a time", max_new_tokens=4).finish_reason == "length"
