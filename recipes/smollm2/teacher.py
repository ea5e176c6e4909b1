"""SmolLM2 on a GPU: its answers in batches of thousands, by one captured step, and its states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, PAIRS, WIDTH, LAYERS, HIDDEN, VOCAB, BASE = 9, 3, 64, 30, 576, 49_152, 100_000.0
"""Shape of SmolLM2-135M."""
END = 2
DEPTHS = (10, 20, 30)
"""Layers after which the states are kept, before the final norm."""
TEMPERATURE, LEAST, SAMPLED = 0.8, 0.05, 4
"""Of sampled answers; tokens below `LEAST` times the likeliest are left out; every how many batches
are sampled."""
MOST = 128
"""Tokens of an answer."""


class Text(NamedTuple):
    """A prompt and the answer that the teacher wrote."""

    ids: np.ndarray
    prompt: int
    """Tokens of the prompt."""
    kind: str = ""


class Prompt(NamedTuple):
    """Ids in the chat template, and the kind."""

    ids: np.ndarray
    kind: str


Parts = tuple[Callable[..., list[Tensor]], Callable[..., Tensor]]


class Layer(NamedTuple):
    """Weights of one layer."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def dequantised(path: Path) -> dict[str, Tensor]:
    """Tensors of a GGUF by their names there, in float32; queries and keys in halves again."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    out = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        values = values.reshape(list(reversed(tensor.shape.tolist())))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            pairs = values.view(values.shape[0] // WIDTH, WIDTH // 2, 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        out[tensor.name] = values
    return out


class Teacher:
    """Runs the model.

    Args:
        weights: as `dequantised` gives them.
        device: where; in bfloat16 on a GPU.
        rows: answers written at a time.
    """

    width = HIDDEN

    def __init__(self, weights: dict[str, Tensor], device: torch.device, rows: int = 2048) -> None:
        self.device, self.rows = device, rows
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        w = {name: tensor.to(device, self.dtype) for name, tensor in weights.items()}
        self.unembedding, self._norm = w["token_embd.weight"], w["output_norm.weight"]
        self.layers = []
        for i in range(LAYERS):
            own = {k.split(".")[2]: v for k, v in w.items() if k.startswith(f"blk.{i}.")}
            qkv = torch.cat([own["attn_q"], own["attn_k"], own["attn_v"]])
            gate_up = torch.cat([own["ffn_gate"], own["ffn_up"]])
            first, second = own["attn_norm"], own["ffn_norm"]
            self.layers.append(
                Layer(first, qkv, own["attn_output"], second, gate_up, own["ffn_down"])
            )
        self._frequencies = BASE ** (-torch.arange(WIDTH // 2, device=device) / (WIDTH // 2))

    def norm(self, states: Tensor) -> Tensor:
        """The final norm of states after the last layer."""
        return _rms(states, self._norm)

    def logits(self, states: Tensor) -> Tensor:
        """`(n, VOCAB)` of states `(n, HIDDEN)` after the last layer; in float32, or half of what
        is nearly equal would be equal."""
        normed = self.norm(states)
        if self.device.type == "cpu":
            return normed @ self.unembedding.T
        return torch.mm(normed, self.unembedding.T, out_dtype=torch.float32)

    @torch.no_grad()
    def states(self, ids: Tensor, cache: Any = None, parts: Parts | None = None) -> Tensor:
        """`(B, T, 3 · HIDDEN)` at `DEPTHS` of texts padded on the right.

        Args:
            ids: `(B, T)`.
            cache: filled if given.
            parts: in place of `before` and `after`, which they may be compiled from.
        """
        (rows, length), (first, second) = ids.shape, parts or (before, after)
        hidden = F.embedding(ids.flatten(), self.unembedding)
        turn = self._turn(torch.arange(length, device=self.device).repeat(rows))
        kept = []
        for i, layer in enumerate(self.layers):
            heads = first(layer, hidden, *turn)
            q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in heads)
            if cache is not None:
                cache[i][0][:, :, :length], cache[i][1][:, :, :length] = k, v
            k, v = (x.repeat_interleave(HEADS // PAIRS, 1) for x in (k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = second(layer, hidden, attended.transpose(1, 2).flatten(0, 1))
            if i + 1 in DEPTHS:
                kept.append(hidden)
        return torch.cat(kept, -1).unflatten(0, (rows, length))

    def write(
        self, prompts: Sequence[Prompt], step: Step, seconds: float, rng: np.random.Generator
    ) -> Iterator[Text]:
        """Answers, one batch in `SAMPLED` sampled, prompts of a kind and length together, until the
        time is over."""
        began, turn = time.time(), 0
        order = sorted(range(len(prompts)), key=lambda j: (prompts[j].kind, len(prompts[j].ids)))
        batches = [order[at : at + self.rows] for at in range(0, len(order), self.rows)]
        while True:
            for i in rng.permutation(len(batches)):
                turn += 1
                if time.time() - began > seconds:
                    return
                batch = [prompts[j] for j in batches[i]]
                yield from self.answers(batch, step, sampled=turn % SAMPLED == 0)

    def answers(self, batch: Sequence[Prompt], step: Step, sampled: bool) -> Iterator[Text]:
        """To at most `rows` prompts."""
        longest = max(len(p.ids) for p in batch)
        ids = np.full((self.rows, longest), END, np.int64)
        for row, prompt in enumerate(batch):
            ids[row, : len(prompt.ids)] = prompt.ids
        lengths = torch.tensor([len(p.ids) for p in batch] + [2] * (self.rows - len(batch)))
        lengths, given = lengths.to(self.device), torch.from_numpy(ids).to(self.device)
        for at in range(0, self.rows, 256):
            part = [(k[at : at + 256], v[at : at + 256]) for k, v in step.cache]
            self.states(given[at : at + 256], part)
        # The last token of a prompt is fed again by the first step.
        step.begin(given.gather(1, lengths[:, None] - 1)[:, 0], lengths - 1)
        tokens: list[Tensor] = []
        ended = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        while len(tokens) < MOST and not (
            len(tokens) % 16 == 0 and float(ended[: len(batch)].float().mean()) > 0.985
        ):
            columns = -(-(longest + len(tokens) + 1) // 64) * 64
            tokens.append(step(columns, sampled).clone())
            ended |= tokens[-1] == END
        written = torch.stack(tokens, 1).cpu().numpy()
        for prompt, answer in zip(batch, written, strict=False):
            ends = np.flatnonzero(answer == END)
            answer = answer[: ends[0] + 1] if len(ends) else answer
            both = np.concatenate([prompt.ids, answer]).astype(np.uint16)
            yield Text(both, len(prompt.ids), prompt.kind)

    def _turn(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(tokens, 1, WIDTH)`."""
        angles = (places.float()[:, None] * self._frequencies).repeat(1, 2)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


class Step:
    """One token of every row; on a GPU a captured graph for each number of columns.

    Args:
        teacher: whose.
        room: most tokens of a text.
    """

    def __init__(self, teacher: Teacher, room: int) -> None:
        shape = teacher.rows, PAIRS, -(-room // 64) * 64, WIDTH
        blank = torch.zeros(shape, device=teacher.device, dtype=teacher.dtype)
        self.cache = [(blank.clone(), blank.clone()) for _ in teacher.layers]
        self.teacher = teacher
        self.tokens = torch.zeros(teacher.rows, dtype=torch.long, device=teacher.device)
        self.places = self.tokens.clone()
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._pool = None if teacher.device.type == "cpu" else torch.cuda.graph_pool_handle()

    def begin(self, tokens: Tensor, places: Tensor) -> None:
        self.tokens.copy_(tokens)
        self.places.copy_(places)

    def __call__(self, columns: int, sampled: bool) -> Tensor:
        key = columns, sampled
        if self.teacher.device.type == "cpu":
            self._run(*key)
        elif key in self._graphs:
            self._graphs[key].replay()
        else:
            before = self.tokens.clone(), self.places.clone()
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._run(*key)
            torch.cuda.current_stream().wait_stream(beside)
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._run(*key)
            self.begin(*before)
            graph.replay()
        return self.tokens

    @torch.no_grad()
    def _run(self, columns: int, sampled: bool) -> None:
        teacher, rows = self.teacher, torch.arange(len(self.tokens), device=self.tokens.device)
        hidden, turn = F.embedding(self.tokens, teacher.unembedding), teacher._turn(self.places)
        seen = torch.arange(columns, device=rows.device) <= self.places[:, None]
        mask = torch.where(seen, 0.0, -torch.inf).to(hidden.dtype)[:, None, None]
        mask = mask.expand(-1, 1, HEADS // PAIRS, -1)
        for layer, (keys, values) in zip(teacher.layers, self.cache, strict=True):
            q, k, v = before(layer, hidden, *turn)
            keys[rows, :, self.places], values[rows, :, self.places] = k, v
            attended = F.scaled_dot_product_attention(
                q.unflatten(1, (PAIRS, -1)), keys[:, :, :columns], values[:, :, :columns],
                attn_mask=mask,
            )  # fmt: skip
            hidden = after(layer, hidden, attended.flatten(1, 2))
        logits = teacher.logits(hidden)
        if sampled:
            scaled = (logits - logits.amax(-1, keepdim=True)) / TEMPERATURE
            noise = -torch.log(torch.empty_like(logits).exponential_().clamp_min(1e-10))
            logits = scaled.masked_fill(scaled < np.log(LEAST), -1e9) + noise
        self.tokens.copy_(logits.argmax(-1))
        self.places.add_(1)


def before(layer: Layer, hidden: Tensor, cosines: Tensor, sines: Tensor) -> list[Tensor]:
    """Queries, keys and values `(tokens, heads, WIDTH)` with their places in them."""
    parts = F.linear(_rms(hidden, layer.norm), layer.qkv).unflatten(-1, (-1, WIDTH))
    turned, values = parts.split([HEADS + PAIRS, PAIRS], 1)
    first, second = turned.chunk(2, -1)
    turned = turned * cosines + torch.cat([-second, first], -1) * sines
    return [*turned.split([HEADS, PAIRS], 1), values]


def after(layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
    """The hidden states behind a layer; `attended` `(tokens, HEADS, WIDTH)`."""
    hidden = hidden + F.linear(attended.flatten(1), layer.out)
    gate, up = F.linear(_rms(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
    return hidden + F.linear(F.silu(gate) * up, layer.down)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)
