"""Encoder-decoder models (Marian's classes): the translator, English to German, and the digest."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from forerun.training.muon import product_type
from forerun.training.runs import keep
from recipes.corpus import load_pools, read_pairs
from recipes.recipe import Recipe
from recipes.runs import CHECKPOINT, TOKENIZER, Run
from recipes.tasks import digest

PAD, EOS = 0, 1
Pair = tuple[list[int], list[int]]
"""Token ids of a source and of its translation, both with the end of text."""


@dataclass(frozen=True)
class MarianArchitecture:
    """The sizes of one Marian model; as many layers in its encoder as in its decoder."""

    layers: int = 6
    hidden: int = 256
    heads: int = 4
    feed_forward: int = 1024
    dropout: float = 0.1

    def build(self, vocab_size: int) -> Any:
        """A freshly initialised ``MarianMTModel`` in float32, residual outputs at zero."""
        from transformers import MarianConfig, MarianMTModel

        model = MarianMTModel(
            MarianConfig(
                vocab_size=vocab_size,
                d_model=self.hidden,
                encoder_layers=self.layers,
                decoder_layers=self.layers,
                encoder_ffn_dim=self.feed_forward,
                decoder_ffn_dim=self.feed_forward,
                encoder_attention_heads=self.heads,
                decoder_attention_heads=self.heads,
                max_position_embeddings=512,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
                decoder_start_token_id=PAD,
                forced_eos_token_id=None,
                dropout=self.dropout,
                activation_function="relu",
                scale_embedding=True,
                init_std=self.hidden**-0.5,
            )
        )
        for part in (model.model.encoder, model.model.decoder):
            for layer in part.layers:
                torch.nn.init.zeros_(layer.self_attn.out_proj.weight)
                torch.nn.init.zeros_(layer.fc2.weight)
        return model


@dataclass(frozen=True)
class TranslatorRecipe:
    """Training settings of the translator, or of a smaller model for another task."""

    target: MarianArchitecture = MarianArchitecture()
    vocab_size: int = 8000
    step_tokens: int = 3072
    """Padded tokens of the longer side of a step's batch."""
    joined: float = 0.5
    """Share of the texts that are several pairs in a row."""
    most: int = 6
    """Pairs in such a text, at most; at least two."""
    smoothing: float = 0.1
    """Of the labels."""
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warm_up: int = 60
    task: str = "translation"
    """Or "digest"; see `read_task`."""

    def rate(self, step: int, decay: tuple[int, int] | None = None) -> float:
        """The learning-rate factor of ``step``, in [0, 1]; see `Recipe.rate`."""
        return Recipe(warm_up=self.warm_up).rate(step, decay)


RECIPES = {
    "translation": TranslatorRecipe(),
    "digest": TranslatorRecipe(
        MarianArchitecture(2, 64, 4, 256, dropout=0.0),
        vocab_size=1280,
        step_tokens=4096,
        joined=0.0,
        smoothing=0.0,
        task="digest",
    ),
}
"""By task. The digest's model is so small for what ships to stay small."""
DRAWN = {"train": 48_000, "val": 400}
"""Digests per split."""


def recipe_for(task: str) -> TranslatorRecipe:
    """The recipe of a task; raises ``ValueError`` with the names known."""
    if task not in RECIPES:
        raise ValueError(f"unknown task {task!r}: one of {', '.join(RECIPES)}")
    return RECIPES[task]


def read_task(data: Path, split: str, task: str) -> list[tuple[str, tuple[str, ...]]]:
    """The sources of a split with all their targets: Tatoeba's, or digests drawn once."""
    if task == "translation":
        return read_pairs(data / "tatoeba" / f"{split}.tsv.gz")
    pool, rng = load_pools(data)[split], random.Random(f"digest/{split}")
    drawn = [digest.sample(rng, split, pool) for _ in range(DRAWN[split])]
    return [(example.prompt, (example.answer,)) for example in drawn]


def recipe_of(saved: dict[str, Any]) -> TranslatorRecipe:
    """A recipe from its saved form."""
    return TranslatorRecipe(**{**saved, "target": MarianArchitecture(**saved["target"])})


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A BPE vocabulary over words, one for both languages, with bytes for what it lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    ends = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(octets), special_tokens=ends, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    vocab = model["vocab"]
    vocab |= {octet: len(vocab) + i for i, octet in enumerate(octets)}
    merges = [tuple(merge) for merge in model["merges"]]
    whole = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    whole.normalizer = normalizers.NFC()
    whole.pre_tokenizer = split
    whole.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    whole.add_special_tokens(ends)
    whole.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return whole


class Texts:
    """The pairs of a split as token ids, and the batches of every step."""

    def __init__(self, data: Path, split: str, tokenizer: Any, recipe: TranslatorRecipe) -> None:
        pairs = read_task(data, split, recipe.task)
        flat = [(source, target) for source, several in pairs for target in several]
        sides = [
            [e.ids for e in tokenizer.encode_batch(list(side))] for side in zip(*flat, strict=True)
        ]
        self.pairs: list[Pair] = list(zip(*sides, strict=True))
        self.recipe = recipe

    def texts(self, rng: random.Random) -> list[Pair]:
        """Every pair once: alone, or several in a row as a short text."""
        order = rng.sample(self.pairs, len(self.pairs))
        out: list[Pair] = []
        while order:
            count = 1 if rng.random() >= self.recipe.joined else rng.randint(2, self.recipe.most)
            parts = [order.pop() for _ in range(min(count, len(order)))]
            source, target = ([t for part in parts for t in part[side][:-1]] for side in (0, 1))
            out.append(([*source, EOS], [*target, EOS]))
        return out

    def batches(self, rng: random.Random) -> list[list[Pair]]:
        """`texts` in batches of alike lengths, in random order."""
        drawn = self.texts(rng)
        drawn.sort(key=lambda pair: max(map(len, pair)) + rng.random() * 2)
        out: list[list[Pair]] = [[]]
        for pair in drawn:
            if out[-1] and max(map(len, pair)) * (len(out[-1]) + 1) > self.recipe.step_tokens:
                out.append([])
            out[-1].append(pair)
        rng.shuffle(out)
        return out

    def stream(self, seed: int, skipped: int) -> Iterator[list[Pair]]:
        """The batches of all steps for ever, beginning with number ``skipped``."""
        epoch = 0
        while True:
            batches = self.batches(random.Random(f"{seed}/{epoch}"))
            yield from batches[skipped:]
            skipped, epoch = max(0, skipped - len(batches)), epoch + 1


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rows, longest)` ids, padded on the right, and whether each is a token."""
    width = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (width - len(text)) for text in texts])
    return ids, torch.tensor([[True] * len(text) + [False] * (width - len(text)) for text in texts])


def loss_of(model: Any, batch: list[Pair], smoothing: float) -> tuple[torch.Tensor, int]:
    """Cross-entropy summed over the translations' tokens, in nats, and their number."""
    source, read = padded([pair[0] for pair in batch])
    target, written = padded([pair[1] for pair in batch])
    before = F.pad(target[:, :-1], (1, 0), value=PAD)
    dtype = product_type()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model.model(
            input_ids=source, attention_mask=read.long(), decoder_input_ids=before, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[written])
    loss = F.cross_entropy(
        logits.float(), target[written], label_smoothing=smoothing, reduction="sum"
    )
    return loss, int(written.sum())


@torch.no_grad()
def held_out(model: Any, texts: Texts, count: int = 400) -> float:
    """Cross-entropy per token of so many validation texts, in nats."""
    model.eval()
    total, tokens = 0.0, 0
    drawn = texts.texts(random.Random(7))[:count]
    drawn.sort(key=lambda pair: len(pair[0]))
    for first in range(0, len(drawn), 32):
        loss, n = loss_of(model, drawn[first : first + 32], 0.0)
        total, tokens = total + float(loss), tokens + n
    model.train()
    return total / tokens


def steps_of(run: Run, texts: Texts) -> Iterator[dict[str, Any]]:
    """Trains; yields a record after every step. Ends with the decay, if one was begun."""
    batches = texts.stream(run.seed, run.step)
    run.model.train()
    while run.decay is None or run.step < sum(run.decay):
        began = time.perf_counter()
        loss, tokens = loss_of(run.model, next(batches), texts.recipe.smoothing)
        (loss / tokens).backward()
        rate = run.recipe.rate(run.step, run.decay)
        run.update(rate)
        yield run.advance(
            tokens,
            time.perf_counter() - began,
            rate=round(rate, 4),
            loss=round(float(loss.detach()) / tokens, 4),
        )


def train(
    data: Path,
    out: Path,
    *,
    steps: int | None = None,
    decay: int | None = None,
    seed: int = 0,
    resume: bool = False,
    recipe: TranslatorRecipe | None = None,
    validate_every: int = 100,
) -> Run:
    """Trains the translator on ``data``, writing checkpoints and a log to ``out``.

    Goes on until step ``steps`` (default: for ever) or, once a ``decay`` of so many steps is
    begun, to its end; a decay that is under way goes on. At its end the model is exported to
    ``out``/target.
    """
    from tokenizers import Tokenizer

    if not (data / "tatoeba" / "train.tsv.gz").exists():
        raise FileNotFoundError(f"no training data at {data / 'tatoeba' / 'train.tsv.gz'}")
    if resume:
        run = Run.load(out / CHECKPOINT, read=recipe_of)
    else:
        if (out / CHECKPOINT).exists():
            raise ValueError(f"{out / CHECKPOINT} exists: resume it, or choose another folder")
        run = Run.new(recipe or TranslatorRecipe(), seed)
        out.mkdir(parents=True, exist_ok=True)
    assert isinstance(run.recipe, TranslatorRecipe)
    path = out / TOKENIZER
    if not path.exists():
        pairs = read_task(data, "train", run.recipe.task)
        lines = [text for source, targets in pairs for text in (source, *targets)]
        train_tokenizer(lines, run.recipe.vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    if decay is not None and run.decay is None:
        run.decay = (run.step, decay)
    learnt, unseen = (Texts(data, split, tokenizer, run.recipe) for split in ("train", "val"))

    def records() -> Iterator[dict[str, Any]]:
        end = sum(run.decay) if run.decay else steps
        for record in steps_of(run, learnt):
            if run.step % validate_every == 0 or run.step == end:
                record["held_out"] = round(held_out(run.model, unseen), 4)
                record["perplexity"] = round(math.exp(record["held_out"]), 2)
            yield record

    if steps is None or run.step < steps:
        keep(run, records(), out, CHECKPOINT, until=steps)
    if run.decay is not None and run.step >= sum(run.decay):
        export(run.model, tokenizer, out / "target")
    return run


def write_pairs(data: Path, out: Path, count: int, seed: int = 0, task: str = "translation") -> int:
    """Writes texts as the model of ``task`` trains on them, for ``forerun train-draft``.

    Args:
        data: the data folder.
        out: the file: lines SOURCE TAB TARGET.
        count: most texts.
        seed: decides which and how they are joined.
        task: of `RECIPES`.

    Returns:
        How many were written.
    """
    recipe = recipe_for(task)
    pairs = read_task(data, "train", task)
    flat = [(source, target) for source, several in pairs for target in several]
    rng = random.Random(seed)
    lines: list[str] = []
    rng.shuffle(flat)
    while flat and len(lines) < count:
        many = 1 if rng.random() >= recipe.joined else rng.randint(2, recipe.most)
        group = [flat.pop() for _ in range(min(many, len(flat)))]
        lines.append("\t".join(" ".join(pair[side] for pair in group) for side in (0, 1)))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def evaluate(folder: str | Path, data: Path, count: int = 300) -> dict[str, Any]:
    """SacreBLEU of greedy translations, of test sentences alone and of joined short texts.

    Args:
        folder: an exported translator, or the name of the one that ships.
        data: the data folder.
        count: sentences; as many in twos to sixes make up the texts.

    Returns:
        "sentences" (all known translations are references) and "texts" (one reference).
    """
    import sacrebleu

    import forerun

    model = forerun.load(folder, "none", device="cpu", dtype="float32")
    pairs = read_pairs(data / "tatoeba" / "test.tsv.gz")[:count]
    rng, joined = random.Random(7), []
    for first in range(0, len(pairs), 4):
        group = pairs[first : first + rng.randint(2, 6)]
        joined.append((" ".join(e for e, _ in group), (" ".join(g[0] for _, g in group),)))
    scores = {}
    for name, rows in (("sentences", pairs), ("texts", joined)):
        done = model.generate([english for english, _ in rows], plain=True, max_new_tokens=160)
        most = max(len(german) for _, german in rows)
        references = [[(*german, *[None] * most)[i] for _, german in rows] for i in range(most)]
        score = sacrebleu.corpus_bleu([c.text for c in done], references)
        scores[name] = {"bleu": round(score.score, 2), "count": len(rows)}
    return scores


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saves a copy in bfloat16, with its tokenizer, to ``folder``."""
    from recipes.export import export_model

    export_model(model, wrap(tokenizer), folder)


def wrap(tokenizer: Any) -> Any:
    """The tokenizer as ``transformers`` sees it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
