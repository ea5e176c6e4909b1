"""Train the EAGLE-like head that ships for SmolLM2, on a GPU: `python -m recipes.smollm2.head`.

The head that ships saw 5.3 M tokens of 84 thousand answers in 200 seconds of one H200, after 100
seconds of writing. What a head is, and its file, stands in `forerun.drafters.eagle`; on any other
target and on a CPU, `forerun train-draft eagle` does the same more slowly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.training.muon import Muon
from recipes.smollm2.teacher import DEPTHS, END, HIDDEN, VOCAB, Teacher, Text, dequantised

STEPS, WEIGHT, SHARE = 4, 0.8, 0.5
"""Steps trained, each one's weight over that before, share of positions of all but the first."""
SOFT, TOP = 0.7, 16
"""Share of the loss that is the teacher's likeliest tokens' instead of its best one's."""
TOKENS = 12_000
"""Of a batch, padding counted."""
MUON_RATE, RATE, WARM_UP, LEVEL, LAST = 0.02, 2e-3, 50, 0.4, 0.03
"""Peak rates; steps of warm-up; share of the time at the peak; the last rate as a share of it."""


class Head(nn.Module):
    """One layer over the token's embedding and the teacher's states of the token before it.

    Args:
        tokens: the vocabulary, ids rising.
        width: of the layer, a multiple of 64.
        inner: width of its MLP.
        teacher: whose embeddings it starts from.
    """

    def __init__(self, tokens: Tensor, width: int, inner: int, teacher: Teacher) -> None:
        super().__init__()
        self.tokens, self.width = tokens, width
        self.ids = torch.full((VOCAB,), len(tokens), device=tokens.device)
        self.ids[tokens] = torch.arange(len(tokens), device=tokens.device)
        table = teacher.table[tokens].float()
        basis = torch.linalg.svd(table, full_matrices=False)[2][:width]
        table = table @ basis.T
        table = table * (0.6 / table.norm(dim=1).mean())
        self.embedding = nn.Parameter(torch.cat([table, table.mean(0, keepdim=True)]))
        layers = {
            "fuse": nn.Linear(len(DEPTHS) * HIDDEN, width, bias=False),
            "input": nn.Linear(2 * width, width, bias=False),
            "qkv": nn.Linear(width, 3 * width, bias=False),
            "out": nn.Linear(width, width, bias=False),
            "gate_up": nn.Linear(width, 2 * inner, bias=False),
            "down": nn.Linear(inner, width, bias=False),
        }
        self.layers = nn.ModuleDict(layers)
        self.norms = nn.ParameterDict(
            {name: torch.ones(width) for name in ("attention_norm", "mlp_norm", "norm")}
        )
        with torch.no_grad():
            for name, scale in (("qkv", 0.7), ("gate_up", 0.7), ("out", 0.3), ("down", 0.3)):
                weight = layers[name].weight
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)
            nn.init.normal_(layers["input"].weight, std=0.2 * width**-0.5)
            layers["input"].weight += 0.4 * torch.eye(width).repeat(1, 2)
            nn.init.normal_(layers["fuse"].weight, std=0.3 * HIDDEN**-0.5)
            norm = teacher.norm.float()
            layers["fuse"].weight[:, -HIDDEN:] = (basis * norm / norm.pow(2).mean().sqrt()).cpu()

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Outputs `(B, T, width)` of each step at each position, all positions at once.

        In step s a token attends to what step 1 made of the tokens up to s − 1 before it, and to
        its own earlier steps of the last s − 1 tokens: what a round has that drafts s tokens.
        """
        length, at, mix = ids.shape[1], torch.arange(ids.shape[1], device=ids.device), self.layers
        embedded = _rms(F.embedding(ids, self.embedding))
        before = mix["fuse"](torch.cat([_rms(s) for s in states.split(HIDDEN, -1)], -1))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for step in range(1, steps + 1):
            before = F.pad(before, (0, 0, 1, 0))[:, :length]
            x = mix["input"](torch.cat([embedded, _rms(before)], -1))
            q, k, v = self._heads(x)
            keys.append(k)
            values.append(v)
            if step == 1:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                seen = at[None, :] <= at[:, None] - step + 1
                scores = (q @ keys[0].mT).masked_fill(~seen, -1e9)
                own = [
                    F.pad(keys[s], (0, 0, step - 1 - s, 0))[:, :, :length] for s in range(1, step)
                ]
                scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True) for k in own)], -1)
                shares = (scores.float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
                attended = shares[..., :length] @ values[0]
                for s in range(1, step):
                    value = F.pad(values[s], (0, 0, step - 1 - s, 0))[:, :, :length]
                    attended = attended + shares[..., length + s - 1, None] * value
            before = self._rest(x, attended)
            outputs.append(_rms(before) * self.norms["norm"])
        return outputs

    def _heads(self, x: Tensor) -> list[Tensor]:
        made = self.layers["qkv"](_rms(x) * self.norms["attention_norm"])
        q, k, v = made.unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * 1e4 ** (
            -torch.arange(32, device=x.device) / 32
        )

        def turn(x: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            cosine, sine = angles.cos(), angles.sin()
            return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1).to(x.dtype)

        return [turn(q), turn(k), v]

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.layers["out"](attended.transpose(1, 2).flatten(2))
        gate, up = self.layers["gate_up"](_rms(x) * self.norms["mlp_norm"]).chunk(2, -1)
        return x + self.layers["down"](F.silu(gate) * up)

    def loss(self, output: Tensor, best: Tensor, shares: Tensor) -> Tensor:
        """Cross-entropy to the teacher's likeliest tokens, as far as they are in the vocabulary.

        Args:
            output: `(N, width)`.
            best: `(N, TOP)` ids in this head's vocabulary, the likeliest first.
            shares: `(N, TOP)` their probabilities.
        """
        count = len(self.tokens)
        logits = F.linear(output, self.embedding[:count].to(output.dtype)).float()
        surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(1, best.clamp(max=count - 1))
        surprise = surprise * (best < count)
        return (SOFT * (shares * surprise).sum(-1) + (1 - SOFT) * surprise[:, 0]).mean()

    def save(self, folder: Path, trained: dict[str, Any]) -> None:
        """As `forerun` reads it."""
        weights: dict[str, Any] = {
            f"{name}.weight": layer.weight for name, layer in self.layers.items()
        }
        weights |= {f"{name}.weight": value for name, value in self.norms.items()}
        weights["embedding.weight"] = self.embedding
        halves = {n: w.detach().to(torch.float16).cpu().contiguous() for n, w in weights.items()}
        folder.mkdir(parents=True, exist_ok=True)
        tokens = self.tokens.to(torch.int32).cpu()
        save_file(halves | {"tokens": tokens}, folder / "draft.safetensors")
        facts = {"format": "forerun draft 1", "kind": "eagle", "depths": DEPTHS, "target": None}
        (folder / "draft.json").write_text(json.dumps(facts | {"trained": trained}, indent=1))


class Labels:
    """What a batch of texts teaches: states, and the teacher's likeliest tokens in answers."""

    def __init__(self, teacher: Teacher, texts: Sequence[Text]) -> None:
        longest, device = max(len(t.ids) for t in texts) - 1, teacher.device
        ids = np.zeros((len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids) - 1] = text.ids[:-1]
        places = [i * longest + np.arange(t.prompt, len(t.ids) - 1) for i, t in enumerate(texts)]
        self.ids = torch.from_numpy(ids).to(device)
        self.states = teacher.states(self.ids)
        self.places = torch.from_numpy(np.concatenate(places)).to(device)
        best, shares = [], []
        for part in self.states[..., -HIDDEN:].reshape(-1, HIDDEN)[self.places].split(8192):
            logits = teacher.logits(part).float()
            top, likeliest = logits.topk(TOP, -1)
            shares.append((top - logits.logsumexp(-1, keepdim=True)).exp())
            best.append(likeliest)
        self.best, self.shares = torch.cat(best), torch.cat(shares)


def batches(texts: Sequence[Text], rng: np.random.Generator) -> Iterator[list[Text]]:
    """Without end: texts of like lengths together, at most `TOKENS` with padding."""
    while True:
        order = rng.permutation(len(texts))
        for first in range(0, len(order), 2048):
            groups: list[list[Text]] = [[]]
            for i in sorted(order[first : first + 2048], key=lambda i: len(texts[i].ids)):
                if groups[-1] and (len(groups[-1]) + 1) * len(texts[i].ids) > TOKENS:
                    groups.append([])
                groups[-1].append(texts[i])
            for group in rng.permutation(len(groups)):
                yield groups[group]


@torch.no_grad()
def tokens_a_round(head: Head, teacher: Teacher, texts: Sequence[Text], drafted: int) -> float:
    """Committed per round on texts that the teacher wrote, `drafted` tokens each time."""
    committed = rounds = 0
    for text in texts:
        labels = Labels(teacher, [text])
        outputs = head(head.ids[labels.ids], labels.states, drafted)
        table, right = head.embedding[:-1], head.ids[labels.best[:, 0]]
        hits = [
            (F.linear(o[0][labels.places], table).argmax(-1) == right).tolist() for o in outputs
        ]
        at, end = 0, len(right)
        while at < end:
            kept = 0
            while kept < drafted and at + kept < end and hits[kept][at + kept]:
                kept += 1
            rounds, at = rounds + 1, at + kept + 1
        committed += end
    return committed / rounds


def fit(
    head: Head, teacher: Teacher, texts: Sequence[Text], seconds: float, rng: np.random.Generator
) -> dict[str, Any]:
    """Train for so long; returns what to say of it."""
    matrices = list(head.layers.parameters())
    others = [p for name, p in head.named_parameters() if not name.startswith("layers")]
    muon = Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began, trained, mixed = time.time(), 0, teacher.device.type == "cuda"
    for step, batch in enumerate(batches(texts, rng)):
        spent = (time.time() - began) / seconds
        if spent >= 1:
            break
        fading = 1.0 if spent < LEVEL else max(LAST, 1 - (spent - LEVEL) / (1 - LEVEL))
        rate = min(1, (step + 1) / WARM_UP) * fading
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = MUON_RATE * rate, RATE * rate
        labels = Labels(teacher, batch)
        best = head.ids[labels.best]
        with torch.autocast(teacher.device.type, torch.bfloat16, enabled=mixed):
            loss = torch.zeros((), device=teacher.device)
            for n, output in enumerate(head(head.ids[labels.ids], labels.states, STEPS)):
                chosen = torch.rand(len(best), device=best.device) < (SHARE if n else 1.0)
                flat = output.reshape(-1, head.width)[labels.places[chosen]]
                loss = loss + WEIGHT**n * head.loss(flat, best[chosen], labels.shares[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        trained += len(best)
        if step % 100 == 0:
            print(
                f"{time.time() - began:.0f} s: {trained} tokens, loss {float(loss):.3f}", flush=True
            )
    return {"tokens": trained, "texts": len(texts), "seconds": round(time.time() - began)}


def main(
    target: Annotated[Path, typer.Option(help="SmolLM2-135M-Instruct as a GGUF file.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines of recipes.smollm2.prompts.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    vocabulary: Annotated[int, typer.Option(help="Tokens it can draft.")] = 12_288,
    width: Annotated[int, typer.Option(help="Of the layer.")] = 384,
    inner: Annotated[int, typer.Option(help="Of its MLP.")] = 1024,
    writing: Annotated[float, typer.Option(help="Seconds of writing.")] = 100,
    training: Annotated[float, typer.Option(help="Seconds of training.")] = 200,
    rows: Annotated[int, typer.Option(help="Answers written at a time.")] = 2048,
) -> None:
    """Let SmolLM2 write answers, and train a head on them."""
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(target.parent, gguf_file=target.name)
    lines = [json.loads(line)["prompt"] for line in prompts.open(encoding="utf-8")]
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    ]
    ids = [x for x in tokenizer(asked, add_special_tokens=False)["input_ids"] if len(x) <= 230]
    teacher = Teacher(dequantised(target), device, rows)
    texts = [t for t in teacher.write(ids, writing, rng) if len(t.ids) > t.prompt + 2]
    held, texts = texts[:100], texts[100:]
    counts = np.zeros(VOCAB)
    for text in texts:
        np.add.at(counts, text.ids[text.prompt :].astype(np.int64), 1.0)
        np.add.at(counts, text.ids[: text.prompt].astype(np.int64), 0.1)
    counts[END] = np.inf
    tokens = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:vocabulary])).to(device)
    head = Head(tokens, width, inner, teacher).to(device)
    facts = fit(head, teacher, texts, training, rng)
    drafted = {f"tokens_a_round_at_{n}": tokens_a_round(head, teacher, held, n) for n in (3, 4)}
    print(facts | drafted)
    head.save(out, facts | {"held_out": drafted})


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-5)


if __name__ == "__main__":
    typer.run(main)
