"""An OpenAI-compatible server around one engine (extra `serve`).

`worker` owns the engine and is the only module that knows it; `protocol` reads requests, `plans`
makes jobs of them, `answers` writes what comes back, `app` ties them together, `run` listens.
"""
