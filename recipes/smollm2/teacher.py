"""SmolLM2 on a GPU: its answers in batches of thousands, by one captured step, and its states."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
TEMPERATURE, LEAST = 0.8, 0.05
"""Of sampled answers; tokens below `LEAST` times the likeliest are left out."""
MOST = 128
"""Tokens of an answer."""


class Text(NamedTuple):
    """A prompt and the answer that the teacher wrote."""

    ids: np.ndarray
    prompt: int
    """Tokens of the prompt."""


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

    def __init__(self, weights: dict[str, Tensor], device: torch.device, rows: int = 2048) -> None:
        self.device, self.rows = device, rows
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        w = {name: tensor.to(device, self.dtype) for name, tensor in weights.items()}
        self.table, self.norm = w["token_embd.weight"], w["output_norm.weight"]
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

    def logits(self, states: Tensor) -> Tensor:
        """Of states after the last layer."""
        return F.linear(_rms(states, self.norm), self.table)

    @torch.no_grad()
    def states(self, ids: Tensor, cache: Any = None) -> Tensor:
        """`(B, T, 3 · HIDDEN)` at `DEPTHS` of texts padded on the right; fills a cache if given."""
        hidden = F.embedding(ids, self.table)
        turn = self._turn(torch.arange(ids.shape[1], device=self.device))
        kept = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, hidden)
            q, k = turn(q), turn(k)
            if cache is not None:
                cache[i][0][:, :, : ids.shape[1]], cache[i][1][:, :, : ids.shape[1]] = k, v
            k, v = (x.repeat_interleave(HEADS // PAIRS, 1) for x in (k, v))
            hidden = self._rest(
                layer, hidden, F.scaled_dot_product_attention(q, k, v, is_causal=True)
            )
            if i + 1 in DEPTHS:
                kept.append(hidden)
        return torch.cat(kept, -1)

    def write(
        self, prompts: Sequence[Sequence[int]], seconds: float, rng: np.random.Generator
    ) -> Iterator[Text]:
        """Answers, greedy and sampled in turn, prompts in random order, until the time is over."""
        room = -(-(max(map(len, prompts)) + MOST) // 64) * 64
        shape = self.rows, PAIRS, room, WIDTH
        blank = torch.zeros(shape, device=self.device, dtype=self.dtype)
        cache = [(blank.clone(), blank.clone()) for _ in self.layers]
        del blank
        step, began = _Step(self, cache), time.time()
        for turn in range(1 << 20):
            order = rng.permutation(len(prompts))
            chunk = self.rows * 8  # of like lengths, or most of a batch is padding
            for first in range(0, len(order), chunk):
                chosen = sorted(order[first : first + chunk], key=lambda j: len(prompts[j]))
                for at in range(0, len(chosen), self.rows):
                    if time.time() - began > seconds:
                        return
                    batch = [list(prompts[j]) for j in chosen[at : at + self.rows]]
                    yield from self._answers(batch, cache, step, sampled=turn % 2 == 1)

    def _answers(
        self, batch: list[list[int]], cache: Any, step: _Step, sampled: bool
    ) -> Iterator[Text]:
        longest = max(map(len, batch))
        padded = batch + [[END] * 2] * (self.rows - len(batch))
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in padded], device=self.device)
        for at in range(0, self.rows, 256):
            self.states(
                ids[at : at + 256], [(k[at : at + 256], v[at : at + 256]) for k, v in cache]
            )
        lengths = torch.tensor([len(p) for p in padded], device=self.device)
        # The last token of a prompt is fed again by the first step.
        step.begin(ids.gather(1, lengths[:, None] - 1)[:, 0], lengths - 1, sampled)
        columns = -(-(longest + MOST) // 64) * 64
        tokens: list[Tensor] = []
        ended = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        while len(tokens) < MOST and not (
            len(tokens) % 16 == 0 and float(ended[: len(batch)].float().mean()) > 0.985
        ):
            tokens.append(step(columns).clone())
            ended |= tokens[-1] == END
        written = torch.stack(tokens, 1).cpu().numpy()
        for prompt, answer in zip(batch, written, strict=False):
            ends = np.flatnonzero(answer == END)
            answer = answer[: ends[0] + 1] if len(ends) else answer
            yield Text(np.concatenate([prompt, answer]).astype(np.uint16), len(prompt))

    def _turn(self, positions: Tensor) -> Any:
        angles = positions.float()[..., None] * self._frequencies
        cosine, sine = (
            torch.cat([f(angles)] * 2, -1).to(self.dtype) for f in (torch.cos, torch.sin)
        )

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cosine + torch.cat([-second, first], -1) * sine

        return turn

    def _heads(self, layer: Layer, hidden: Tensor) -> list[Tensor]:
        parts = F.linear(_rms(hidden, layer.norm), layer.qkv).unflatten(-1, (-1, WIDTH))
        return [x.transpose(1, 2) for x in parts.split([HEADS, PAIRS, PAIRS], 2)]

    def _rest(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), layer.out)
        gate, up = F.linear(_rms(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)


class _Step:
    """One token of every row; on a GPU a captured graph for each number of columns."""

    def __init__(self, teacher: Teacher, cache: Any) -> None:
        self.teacher, self.cache = teacher, cache
        self.tokens = torch.zeros(teacher.rows, dtype=torch.long, device=teacher.device)
        self.places, self.noise = self.tokens.clone(), torch.zeros((), device=teacher.device)
        self._graphs: dict[int, Any] = {}

    def begin(self, tokens: Tensor, places: Tensor, sampled: bool) -> None:
        self.tokens.copy_(tokens)
        self.places.copy_(places)
        self.noise.fill_(float(sampled))

    def __call__(self, columns: int) -> Tensor:
        if self.teacher.device.type == "cpu":
            self._run(columns)
        elif columns in self._graphs:
            self._graphs[columns].replay()
        else:
            before = self.tokens.clone(), self.places.clone()
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._run(columns)
            torch.cuda.current_stream().wait_stream(beside)
            graph = self._graphs[columns] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(columns)
            self.begin(*before, bool(self.noise))
            graph.replay()
        return self.tokens

    @torch.no_grad()
    def _run(self, columns: int) -> None:
        teacher, rows = self.teacher, torch.arange(len(self.tokens), device=self.tokens.device)
        hidden, turn = F.embedding(self.tokens, teacher.table)[:, None], teacher._turn(self._one())
        seen = torch.arange(columns, device=rows.device) <= self.places[:, None]
        mask = seen[:, None, None].expand(-1, 1, HEADS // PAIRS, -1)
        for layer, (keys, values) in zip(teacher.layers, self.cache, strict=True):
            q, k, v = teacher._heads(layer, hidden)
            keys[rows, :, self.places], values[rows, :, self.places] = turn(k)[:, :, 0], v[:, :, 0]
            grouped = turn(q).reshape(len(rows), PAIRS, HEADS // PAIRS, WIDTH)
            attended = F.scaled_dot_product_attention(
                grouped, keys[:, :, :columns], values[:, :, :columns], attn_mask=mask
            )
            hidden = teacher._rest(layer, hidden, attended.reshape(len(rows), HEADS, 1, WIDTH))
        logits = teacher.logits(hidden[:, 0]).float()
        scaled = (logits - logits.amax(-1, keepdim=True)) / TEMPERATURE
        likely = scaled.masked_fill(scaled < np.log(LEAST), -1e9)
        gumbel = -torch.log(torch.empty_like(logits).exponential_().clamp_min(1e-10))
        self.tokens.copy_(torch.where(self.noise > 0, likely + gumbel, logits).argmax(-1))
        self.places.add_(1)

    def _one(self) -> Tensor:
        return self.places[:, None, None]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-5).to(x.dtype)
