"""The same policies inside other engines: `forerun.transformers`, `forerun.vllm` are the doors."""
