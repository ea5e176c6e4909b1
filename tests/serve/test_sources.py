"""Completions of an encoder-decoder model: the prompt is the source."""

from __future__ import annotations

import forerun
from sourced import SOURCES, save_folders

from .conftest import running


def test_completions_translate_their_prompt(tmp_path) -> None:
    folders = save_folders(tmp_path)
    model = forerun.load(folders.target, folders.draft, dtype="float32")
    wanted = model.generate(SOURCES[0], max_new_tokens=8)
    with running(model, max_rows=2) as server:
        answer = server.complete(SOURCES[0], max_tokens=8, temperature=0)
        assert answer["choices"][0]["text"] == wanted.text
        assert answer["usage"]["prompt_tokens"] == wanted.stats.source_tokens
        long = server.post("/v1/completions", prompt=[5] * 513, max_tokens=2)
        assert long.status_code == 400
        assert "the encoder reads 512" in long.json()["error"]["message"]
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        assert chat.status_code == 400
        assert "use /v1/completions" in chat.json()["error"]["message"]
