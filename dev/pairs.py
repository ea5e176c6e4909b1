"""Make tests/data/pair-*.parquet: what the drafts of three poor pairs are worth.

`auto` was tuned on the shipped pair. These are unlike it: tiny models made from scratch in a minute
of one core each, which write captions, code and characters of books, sampled at T = 0.6.
``python dev/pairs.py DATA`` in the repository's root; DATA holds multi30k/train.en.gz, train.de.gz
and books/*.txt, code is Python's own library.
"""

import gzip
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import forerun
from forerun.drafters.model import ModelDrafter
from forerun.lab.traces.record import Task, record
from forerun.requests import Sampling
from forerun.runtime.base import Rows
from forerun.runtime.torch_executor import TorchExecutor
from forerun.training.muon import Muon

PAIRS = {"captions": (1024, (3, 128), (1, 64)), "code": (1024, (3, 128), (1, 64)),
         "bytes": (257, (3, 128), (1, 64))}  # fmt: skip
"""Vocabulary; layers and width of target and draft."""
WIDTH, ROWS, STEPS, RATE = 64, 8, 150, 3e-3
"""Tokens of a row, rows of a step, steps, Adam's peak rate; Muon's is seven times that."""
PROMPTS, PROMPT, TOKENS, DEPTH = 24, 24, 64, 8


def texts(name: str, data: Path) -> list[str]:
    """What a pair learns, and behind that what it is tried on."""
    if name == "captions":
        files = [data / "multi30k" / f"train.{side}.gz" for side in ("en", "de")]
        sides = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        return [f"{a} = {b}\n" for a, b in zip(*sides, strict=True)]
    if name == "code":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        files = sorted((data / "books").glob("*.txt"))
    return [file.read_text(errors="ignore")[:60_000] for file in files]


def tokenizer(vocabulary: int, text: str) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": ["<end>"], "show_progress": False, "initial_alphabet": alphabet}
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocabulary, **how))
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def trained(layers: int, width: int, vocabulary: int, ids: torch.Tensor) -> hf.LlamaForCausalLM:
    """A Llama that has read rows of one long text."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=width // 32,
            max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "layers" not in name]
    both = Muon(inside, 7 * RATE, 0.95, 0.0), torch.optim.AdamW(others, RATE, weight_decay=0.0)
    for step in range(STEPS):
        at = torch.randint(len(ids) - WIDTH, (ROWS, 1)) + torch.arange(WIDTH)
        loss = model(input_ids=ids[at], labels=ids[at]).loss
        loss.backward()
        for one, rate in zip(both, (7 * RATE, RATE), strict=True):
            one.param_groups[0]["lr"] = rate * min((step + 1) / 20, 1.0, 2 * (1 - step / STEPS))
            one.step()
            one.zero_grad()
    print(f"{layers} × {width}: loss {loss.item():.2f}")
    return model.eval()


def main(name: str, data: Path) -> None:
    """Train a pair, and record its texts."""
    vocabulary, *sizes = PAIRS[name]
    written = texts(name, data)
    cut = len(written) * 9 // 10
    learned = "".join(np.random.default_rng(0).permutation(written[:cut]).tolist())[:1_500_000]
    words = tokenizer(vocabulary, learned)
    ids = torch.tensor(words(learned).input_ids)
    target, draft = (Rows(TorchExecutor(trained(*size, vocabulary, ids))) for size in sizes)
    model = forerun.Model(target, ModelDrafter(draft, vocabulary), words)
    held = words("".join(written[cut:])[:200_000]).input_ids
    tasks = [
        Task(name, str(n), held[start : start + PROMPT],
             Sampling(temperature=0.6, seed=n, max_new_tokens=TOKENS, ignore_eos=True))
        for n, start in enumerate(np.linspace(0, len(held) - PROMPT, PROMPTS, dtype=int).tolist())
    ]  # fmt: skip
    trace = record(model, tasks, depth=DEPTH)
    nothing = np.full_like(trace.accept_prob, np.nan)  # compresses to nothing; `auto` reads margins
    signals = dict.fromkeys(trace.signals, nothing)
    signals["logit_margin"] = trace.signals["logit_margin"].round(1)
    judged = dict.fromkeys(trace.judged, nothing)
    file = Path("tests/data") / f"pair-{name}.parquet"
    replace(trace, signals=signals, judged=judged, about={}).write(file)
    kept = (trace.matches > 0)[trace.valid].mean()
    print(f"{file}: {file.stat().st_size} bytes, first drafted tokens kept {kept:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2:] or PAIRS:
        main(chosen, Path(sys.argv[1]))
