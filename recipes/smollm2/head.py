"""Train the heads `eagle` and `eagle3` of SmolLM2 on a GPU: `python -m recipes.smollm2.head`.

The model writes answers for as long as it is let, then heads learn from them together: its states
are computed anew for every batch. What a head is and how it learns stands in
`forerun.training.eagle`; on any other target and on a CPU, `forerun train-draft` does the same more
slowly.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from forerun.runtime.drafts import About, rounded, save_draft
from forerun.runtime.eagle import StateHead
from forerun.runtime.eagle3 import Eagle3Head, save_head
from forerun.training.eagle import (
    WEIGHT,
    begun,
    begun3,
    goals_of,
    loss_of,
    optimizers,
    rounds_of,
    unrolled,
)
from recipes.smollm2 import teacher as teachers
from recipes.smollm2.teacher import (
    DEPTHS,
    END,
    HIDDEN,
    MOST,
    VOCAB,
    Prompt,
    Step,
    Teacher,
    Text,
    dequantised,
)

EDGES = (96, 128, 160, 192, 240, 288, 360)
"""Tokens to which texts are padded; all batches have the same number, a multiple of each."""
SCORED = 0.6
"""Share of a batch's places that is learned from at most."""
STEPS = 4
WARM_UP, LEVEL, LAST = 50, 0.3, 0.03
"""Steps of warm-up; share of the time at the peak rate; the last rate as a share of it."""
LOOKS = 5
"""Times that heads are measured and saved, the beginning not counted."""
KEPT = 9_000_000
"""Tokens of texts that are kept."""


class Shelf:
    """Texts of like lengths on a device."""

    def __init__(self, texts: Sequence[Text], edge: int, device: torch.device) -> None:
        ids = np.full((len(texts), edge), END, np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids) - 1] = text.ids[:-1]
        self.ids = torch.from_numpy(ids).to(device)
        bounds = np.array([(text.prompt, len(text.ids) - 1) for text in texts])
        self.bounds = torch.from_numpy(bounds).to(device)
        """`(texts, 2)` first and last but one place of what counts."""


def shelves(texts: Sequence[Text], device: torch.device) -> dict[int, Shelf]:
    """By the edge to which they are padded; texts that are longer than all are left out."""
    out, below = {}, 0
    for edge in EDGES:
        own = [text for text in texts if below < len(text.ids) - 1 <= edge]
        if own:
            out[edge] = Shelf(own, edge, device)
        below = edge
    return out


def batches(
    shelved: dict[int, Shelf], tokens: int, rng: np.random.Generator
) -> Iterator[tuple[int, Tensor]]:
    """Without end: an edge and rows of its shelf, all of them before one comes again."""
    edges = list(shelved)
    sizes = np.array([shelved[edge].ids.numel() for edge in edges], float)
    waiting: dict[int, list[int]] = {edge: [] for edge in edges}
    while True:
        edge = edges[rng.choice(len(edges), p=sizes / sizes.sum())]
        count = tokens // edge
        while len(waiting[edge]) < count:
            waiting[edge] += rng.permutation(len(shelved[edge].ids)).tolist()
        yield edge, torch.tensor(waiting[edge][:count])
        del waiting[edge][:count]


class Fit:
    """Heads that learn together.

    Args:
        heads: by name; they have the same vocabulary.
        teacher: whose states they read.
        vocabulary: `(V,)` rising ids.
        shelved: texts.
        tokens: of a batch, padding counted.
        fast: compile what takes longest.
    """

    def __init__(
        self,
        heads: dict[str, StateHead],
        teacher: Teacher,
        vocabulary: Tensor,
        shelved: dict[int, Shelf],
        tokens: int,
        fast: bool,
    ) -> None:
        self.heads, self.teacher, self.vocabulary, self.shelved = (
            heads,
            teacher,
            vocabulary,
            shelved,
        )
        self.index = torch.full((VOCAB,), -1, device=teacher.device)
        self.index[vocabulary] = torch.arange(len(vocabulary), device=teacher.device)
        self.tokens, self.places = tokens, int(SCORED * tokens)
        self.own = [p for head in heads.values() for p in head.parameters()]
        self.gradients = [torch.zeros_like(p) for p in self.own]
        for p, gradient in zip(self.own, self.gradients, strict=True):
            p.grad = gradient
        rates = {"eagle": 2e-3, "eagle3": 1e-3}
        self.optimizers = [
            optimizer
            for name, head in heads.items()
            for optimizer in optimizers(dict(head.named_parameters()), rates[name])
        ]
        self.peaks = [o.param_groups[0]["lr"] for o in self.optimizers]
        self.loss = torch.zeros(len(heads), device=teacher.device)
        self.seen = torch.zeros((), dtype=torch.float64, device=teacher.device)
        self.rows: dict[int, Tensor] = {}
        self.graphs: dict[int, Any] = {}
        self._pool = None if teacher.device.type == "cpu" else torch.cuda.graph_pool_handle()
        self.compile(fast)

    def compile(self, fast: bool) -> None:
        """Choose whether the teacher's layers and the loss are compiled."""
        pieces: list[Any] = [teachers.before, teachers.after, loss_of]
        if fast:
            pieces = [torch.compile(piece, dynamic=False) for piece in pieces]
        before, after, self.loss_of = pieces
        self.parts: Any = before, after

    def __call__(self, edge: int, rows: Tensor, rate: float) -> None:
        """A step on these rows of a shelf, at `rate` times the peak rates."""
        if edge in self.rows:
            self.rows[edge].copy_(rows, non_blocking=True)
            self._gradients_of(edge)
        else:  # the first time warms up what a graph is captured of
            self.rows[edge] = rows.to(self.teacher.device)
            self._gradients(edge)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()

    def _gradients_of(self, edge: int) -> None:
        if self.teacher.device.type == "cuda" and edge not in self.graphs:
            graph: Any = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                    self._gradients(edge)
                self.graphs[edge] = graph
            except RuntimeError as error:
                print("no graph:", str(error).splitlines()[0], flush=True)
                self.graphs[edge] = None
        if graph := self.graphs.get(edge):
            graph.replay()
        else:
            self._gradients(edge)

    def _gradients(self, edge: int) -> None:
        """Of all heads on the rows that are set."""
        torch._foreach_zero_(self.gradients)
        shelf, rows = self.shelved[edge], self.rows[edge]
        ids, (first, last) = shelf.ids[rows].long(), shelf.bounds[rows].unbind(1)
        at = torch.arange(edge, device=ids.device)
        counts = ((at >= first[:, None]) & (at < last[:, None])).flatten()
        drawn = torch.rand(counts.shape, device=ids.device) + counts
        chosen = drawn.argsort(descending=True)[: self.places]
        weights = counts[chosen].float()
        with torch.no_grad():
            states = self.teacher.states(ids, parts=self.parts)
            goals = self._goals(states, chosen) * (weights / weights.sum())[:, None]
            goals = goals.to(torch.bfloat16)
        half = len(chosen) // 2
        shares = 1.0, weights.sum() / weights[:half].sum()
        for place, head in enumerate(self.heads.values()):
            with torch.autocast(ids.device.type, torch.bfloat16, ids.is_cuda, cache_enabled=False):
                outputs = unrolled(head, self._read(head, ids), states, len(DEPTHS), STEPS)
                loss = self.loss.new_zeros(())
                for step, output in enumerate(outputs):
                    count = half if step else len(chosen)
                    x = output.flatten(0, 1).index_select(0, chosen[:count])
                    one = self.loss_of(head.logits(x), goals[:count])
                    loss = loss + WEIGHT**step * shares[step > 0] * one
                    if step == 0:
                        self.loss[place].copy_(one.detach())
            loss.backward()
        self.seen += weights.sum()

    def _goals(self, states: Tensor, chosen: Tensor) -> Tensor:
        last = states[..., -HIDDEN:].flatten(0, 1)[chosen]
        parts = []
        for part in last.split(4096):
            logits = self.teacher.logits(part)
            best = self.index[logits.argmax(-1)]
            own = logits[:, self.vocabulary]
            parts.append(goals_of(own, logits.float().logsumexp(-1), best)[0].bfloat16())
        return torch.cat(parts)

    def _read(self, head: StateHead, ids: Tensor) -> Tensor:
        """Ids as a head reads them."""
        if head.reads == VOCAB:
            return ids
        cut = self.index[ids]
        return torch.where(cut < 0, len(self.vocabulary), cut)

    @torch.no_grad()
    def measure(self, head: StateHead, texts: Sequence[Text]) -> dict[str, float]:
        """Tokens a round at `STEPS` drafted on texts that the teacher wrote, by their kinds."""
        counts: dict[str, list[int]] = {}
        for first in range(0, len(texts), 32):
            part = texts[first : first + 32]
            longest = max(len(text.ids) for text in part) - 1
            shelf = Shelf(part, longest, self.teacher.device)
            ids, spans = shelf.ids.long(), shelf.bounds.tolist()
            states = self.teacher.states(ids)
            outputs = unrolled(head, self._read(head, ids), states, len(DEPTHS), STEPS)
            for row, (begin, end) in enumerate(spans):
                logits = self.teacher.logits(states[row, begin:end, -HIDDEN:])
                best = self.index[logits.argmax(-1)]
                own = (output[row, begin:end] for output in outputs)
                right = torch.stack([head.logits(x).argmax(-1) == best for x in own], -1)
                for kind in (part[row].kind, "all"):
                    count = counts.setdefault(kind, [0, 0])
                    count[0] += end - begin
                    count[1] += rounds_of(right)
        return {kind: round(n / max(r, 1), 3) for kind, (n, r) in sorted(counts.items())}


def run(
    fit: Fit, held: Sequence[Text], seconds: Callable[[], float], out: Path, facts: dict[str, Any]
) -> None:
    """Train for so long; show and save now and then, and at the end."""
    rng, whole, began, looks = np.random.default_rng(1), seconds(), time.time(), 0
    for step, (edge, rows) in enumerate(batches(fit.shelved, fit.tokens, rng)):
        share = min(1.0, 1 - seconds() / whole)
        if share >= looks / LOOKS:
            took, seen, looks = time.time() - began, int(fit.seen), looks + 1
            print(
                f"{took:.0f} s: {seen} answer tokens in {step} steps, {seen / took:.0f} a second, "
                f"{fit.tokens * step / took:.0f} with prompts and padding; losses",
                [round(x, 3) for x in fit.loss.tolist()],
                flush=True,
            )
            own = {"tokens": seen, "steps": step, "seconds": round(took)}
            save(fit, held, out, facts | own)
        if share == 1.0:
            return
        fading = 1.0 if share < LEVEL else max(LAST, 1 - (share - LEVEL) / (1 - LEVEL))
        fit(edge, rows, min(1.0, (step + 1) / WARM_UP) * fading)


def save(fit: Fit, held: Sequence[Text], out: Path, trained: dict[str, Any]) -> None:
    """As `forerun` reads them: `eagle` in 8 bits, `eagle3` as a folder of `speculators`."""
    for name, head in fit.heads.items():
        rounds = fit.measure(head, held)
        print(" ", name, json.dumps(rounds), flush=True)
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps({"head": name, **trained, "tokens_a_round": rounds}) + "\n")
        own = trained | {f"tokens_a_round_at_{STEPS}": rounds}
        if isinstance(head, Eagle3Head):
            save_head(out / name, head, fit.vocabulary, DEPTHS, own)
            continue
        tensors = rounded(head.state_dict()) | {"tokens": fit.vocabulary.to(torch.int32)}
        save_draft(out / name, About("eagle", None, {"depths": list(DEPTHS)}, own), tensors)


def frequent(texts: Sequence[Text], count: int) -> np.ndarray:
    """`(count,)` rising ids of the tokens that answers, and a little prompts, have most often."""
    counts = np.zeros(VOCAB)
    for part, weight in ((slice(None, None), 0.1), (slice(1, None), 0.9)):
        own = [text.ids if part.start is None else text.ids[text.prompt :] for text in texts]
        counts += weight * np.bincount(np.concatenate(own), minlength=VOCAB)
    counts[END] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def read_prompts(path: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Of a file of `recipes.smollm2.prompts`: those that are held out, and the others."""
    with np.load(path) as kept:
        parts = np.split(kept["ids"], np.cumsum(kept["lengths"].astype(int))[:-1])
        names = [str(name) for name in kept["names"]]
        every = [Prompt(p, names[k]) for p, k in zip(parts, kept["kinds"], strict=True)]
        return every[: kept["held"]], every[kept["held"] :]


def read_texts(path: Path) -> list[Text]:
    """Answers that are kept as JSON lines: "ids", "n" of them a prompt's, "kind"."""
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return [Text(np.array(x["ids"]), x["n"], "former " + x["kind"]) for x in lines]


def keep(texts: Sequence[Text], path: Path) -> None:
    """Save the first `KEPT` tokens of texts."""
    count = int(np.searchsorted(np.cumsum([len(text.ids) for text in texts]), KEPT))
    taken = texts[:count]
    np.savez_compressed(
        path,
        ids=np.concatenate([text.ids for text in taken]),
        lengths=np.array([len(text.ids) for text in taken], np.int16),
        prompts=np.array([text.prompt for text in taken], np.int16),
        kinds=np.array([text.kind for text in taken]),
    )


def main(
    target: Annotated[Path, typer.Option(help="SmolLM2-135M-Instruct as a GGUF file.")],
    prompts: Annotated[Path, typer.Option(help="Ids by recipes.smollm2.prompts.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    held: Annotated[Path | None, typer.Option(help="More held-out answers, .jsonl.gz.")] = None,
    heads: Annotated[str, typer.Option(help="Which of eagle and eagle3.")] = "eagle,eagle3",
    vocabulary: Annotated[int, typer.Option(help="Tokens they can draft.")] = 12_288,
    width: Annotated[int, typer.Option(help="Of eagle's layer.")] = 384,
    writing: Annotated[float, typer.Option(help="Seconds of writing.")] = 110,
    training: Annotated[float, typer.Option(help="Seconds of training.")] = 290,
    stop: Annotated[float, typer.Option(help="Seconds for all.")] = 480,
    rows: Annotated[int, typer.Option(help="Answers written at a time.")] = 2048,
    tokens: Annotated[int, typer.Option(help="Of a batch, with prompts and padding.")] = 23_040,
    fast: Annotated[bool, typer.Option(help="Compile the teacher's layers.")] = True,
) -> None:
    """Let SmolLM2 write answers, and train heads on them."""
    began = time.time()

    def say(line: str) -> None:
        print(f"[{time.time() - began:.0f}] {line}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = Teacher(dequantised(target), device, rows)
    unseen, asked = read_prompts(prompts)
    say(f"{len(asked)} prompts, {len(unseen)} held out, on {device}")
    longest = max(len(prompt.ids) for prompt in [*unseen, *asked])
    step = Step(teacher, longest + MOST)
    batches_of_held = [unseen[i : i + rows] for i in range(0, len(unseen), rows)]
    kept = [t for batch in batches_of_held for t in teacher.answers(batch, step, sampled=False)]
    kept += [] if held is None else read_texts(held)
    written_from = time.time()
    texts = [t for t in teacher.write(asked, step, writing, rng) if len(t.ids) > t.prompt + 2]
    answers = sum(len(t.ids) - t.prompt for t in texts)
    say(f"{len(texts)} texts, {answers / (time.time() - written_from):.0f} answer tokens/s")
    del step
    if device.type == "cuda":
        torch.cuda.empty_cache()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
    keep(texts, out / "texts.npz")
    ids = torch.from_numpy(frequent(texts, vocabulary)).to(device)
    access: Any = teacher
    made: dict[str, StateHead] = {
        name: begun(access, width, ids, len(DEPTHS)) if name == "eagle"
        else begun3(access, teacher.unembedding, ids, len(DEPTHS))
        for name in heads.split(",")
    }  # fmt: skip
    fit = Fit(made, teacher, ids, shelves(texts, device), tokens, fast)
    edge, first = next(batches(fit.shelved, tokens, rng))
    try:
        fit(edge, first, 0.0)
    except Exception as error:  # whatever a compiler raises
        say(f"not compiled: {str(error).splitlines()[0]}")
        fit.compile(False)
        fit(edge, first, 0.0)
    say("training begins")
    end = min(time.time() + training, began + stop)
    facts = {"texts": len(texts), "answer_tokens": answers, "device": str(device)}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    kept = [t for t in kept if len(t.ids) > t.prompt + 2]
    run(fit, kept, lambda: end - time.time(), out, facts)
    say("done")


if __name__ == "__main__":
    typer.run(main)
