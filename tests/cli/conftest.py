"""A tiny random pair on disk, so that the command line is tested without the shipped weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from real import LASTING


def _save(folder: Path, layers: int, context: int) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


@dataclass(frozen=True)
class Pair:
    target: str
    draft: str

    @property
    def options(self) -> list[str]:
        return ["--target", self.target, "--draft", self.draft, "--device", "cpu"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    LASTING.update(str(folder / part) for part in ("target", "draft"))
    return Pair(_save(folder / "target", 3, 128), _save(folder / "draft", 1, 128))


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        assert self.out, f"exit code {self.code}: {self.err}"
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one error line, and nothing else on stderr."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert re.match(r"error: \S", lines[0]), self.err
        return lines[0]


@pytest.fixture
def forerun(capsys, monkeypatch):
    """Run the command line in this process."""
    from forerun.cli import main

    monkeypatch.delenv("FORERUN_DEBUG", raising=False)

    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = main(list(argv))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(code, out, err)

    return run


@pytest.fixture
def generate(forerun, pair):
    """`forerun generate` on the tiny pair."""

    def run(*argv: str) -> Result:
        return forerun("generate", *pair.options, *argv)

    return run
