"""RSD, a baseline of EASD: the draft writes a step; if its reward is low, the target does.

Reward-guided speculative decoding (Liao et al. 2025) takes a process reward model of its own. Here
it is a logistic head on the target's last hidden state at the end of a step, trained on steps of
the arithmetic family: it has no language to judge with but the target's, and knows no other task.
A benchmark, not a rule: what it accepts is a step, by a text's end.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import forerun
from benchmarks.common import RESULTS, provenance, save, table
from benchmarks.quality import Problem, coins
from forerun import zoo
from forerun.runtime.cache import cache_argument
from forerun.runtime.load import load_model
from recipes.scoring import final_number
from recipes.tasks import arithmetic
from recipes.tasks.base import Pool

THRESHOLD = 0.7
"""EASD's setting of it."""
END, MOST = ".", 12
"""A step ends with a sentence; no answer has more steps than that."""
_STEP = re.compile(r"(-?\d+) ([-+*/]) (-?\d+)(?: \(.*\))? = (-?\d+)\.")


def verdict(written: Sequence[str], worked: Sequence[str]) -> list[bool]:
    """Per written step, up to the first wrong one: is its result true, and the one needed there?

    >>> worked = ["27 * 8 (7 * 8 = 56, 2 * 8 + 5 = 21) = 216.", "216 - 6 = 210."]
    >>> verdict(["8 * 27 = 216.", "216 - 7 = 209.", "209 - 1 = 208."], worked)
    [True, False]
    >>> verdict(["27 * 8 = 216.", "The answer is 216."], worked)
    [True, False]
    """
    values = [int(_STEP.search(step)[4]) for step in worked]  # type: ignore[index]
    verdicts: list[bool] = []
    for place, step in enumerate(written):
        answer = final_number(step)
        if answer is not None:
            verdicts.append(place == len(worked) and answer == values[-1])
        else:
            verdicts.append(place < len(worked) and _true(step) == values[place])
        if not verdicts[-1]:
            break
    return verdicts


def _true(step: str) -> int | None:
    """The result that a step states, if it is that of its operation."""
    if (made := _STEP.fullmatch(step.strip())) is None:
        return None
    left, sign, right, stated = made.groups()
    if sign == "/" and not int(right):
        return None
    value = arithmetic.result(int(left), sign, int(right))
    return value if value == int(stated) else None


class Scorer:
    """How likely the last step of a text is right, by the target's last hidden state behind it."""

    def __init__(self, weights: torch.Tensor | None = None) -> None:
        self._body = load_model(str(zoo.TARGET), "cpu", "float32").base_model
        self.weights = weights
        """`(d + 1,)`: a logistic head and its bias; None before training."""
        self._read: list[int] = []
        self._cache: Any = None

    @classmethod
    def load(cls) -> Scorer:
        """As `rsd-scorer` trained it."""
        results = json.loads((RESULTS / "rsd-scorer.json").read_text())["results"]
        return cls(torch.tensor(results["weights"]))

    @torch.inference_mode()
    def states(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """`(n, d)` hidden states of the texts' last tokens; of a single text only what is new."""
        if len(texts) == 1:
            return self._next(list(texts[0]))
        out = []
        for first in range(0, len(texts), 64):
            batch = texts[first : first + 64]
            longest = max(map(len, batch))
            ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in batch])
            last = torch.tensor([len(text) - 1 for text in batch])
            states = self._body(ids, use_cache=False).last_hidden_state
            out.append(states[torch.arange(len(batch)), last])
        return torch.cat(out)

    def _next(self, text: list[int]) -> torch.Tensor:
        same = 0
        while same < min(len(self._read), len(text) - 1) and self._read[same] == text[same]:
            same += 1
        if not same:
            self._cache = DynamicCache()
        elif same < len(self._read):
            self._cache.crop(same - len(self._read))
        ids = torch.tensor([text[same:]])
        cache = {cache_argument(self._body): self._cache, "use_cache": True}
        states = self._body(ids, **cache).last_hidden_state
        self._read = text
        return states[:, -1]

    def rewards(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Probabilities, one per text."""
        assert self.weights is not None
        return (self.states(texts) @ self.weights[:-1] + self.weights[-1]).sigmoid().tolist()


@dataclass(frozen=True)
class Answer:
    """What RSD wrote to one prompt."""

    text: str
    tokens: int
    """An end of text counted, as in other methods."""
    steps: int
    kept: int
    """Steps that are the draft's."""


def answers(
    target: Any,
    draft: Any,
    scorer: Any,
    prompts: Sequence[Sequence[int]],
    limit: int = arithmetic.MAX_NEW_TOKENS,
    threshold: float = THRESHOLD,
) -> list[Answer]:
    """Answer all prompts together, step by step, greedily.

    Args:
        target: writes the steps that are refused.
        draft: writes every step first; a model that decodes plainly.
        scorer: `rewards(texts)` of texts that end with a step.
        prompts: token ids.
        limit: tokens of an answer at most.
        threshold: a step is kept if its reward reaches it.
    """
    texts, kept = [list(p) for p in prompts], [0] * len(prompts)
    steps, going = [0] * len(prompts), list(range(len(prompts)))
    while going:
        own = _steps(draft, [texts[i] for i in going])
        tried = [texts[i] + step for i, step in zip(going, own, strict=True)]
        good = [reward >= threshold for reward in scorer.rewards(tried)]
        refused = [i for i, ok in zip(going, good, strict=True) if not ok]
        other = iter(_steps(target, [texts[i] for i in refused]) if refused else ())
        still = []
        for i, step, ok in zip(going, own, good, strict=True):
            text = step if ok else next(other)
            texts[i] += text
            steps[i] += 1
            kept[i] += ok
            written = target.tokenizer.decode(texts[i][len(prompts[i]) :])
            ended = not text or text[-1] in target.eos
            done = ended or final_number(written) is not None
            if not (done or steps[i] == MOST or len(texts[i]) - len(prompts[i]) >= limit):
                still.append(i)
        going = still
    out = []
    for text, prompt, count, drafted in zip(texts, prompts, steps, kept, strict=True):
        own = [token for token in text[len(prompt) :] if token not in target.eos]
        out.append(Answer(target.tokenizer.decode(own), len(own) + 1, count, drafted))
    return out


def _steps(model: Any, texts: Sequence[list[int]]) -> list[list[int]]:
    """The next step of every text, its end included."""
    how = {"plain": True, "stop": [END], "max_new_tokens": 64, "batch_size": 64}
    return [done.tokens for done in model.generate(texts, **how)]


def train(problems: int) -> None:
    """Train the head and write `rsd-scorer.json`."""
    target, draft = forerun.load(), forerun.load(zoo.DRAFT, draft="none")
    scorer = Scorer()
    seen, right = _examples(target, draft, scorer, "train", problems)
    new, truth = _examples(target, draft, scorer, "val", max(problems // 5, 20))
    scorer.weights = _fitted(seen, right)
    logits = new @ scorer.weights[:-1] + scorer.weights[-1]
    kept = logits.sigmoid() >= THRESHOLD
    results = {
        "steps": len(right),
        "right": float(right.mean()),
        "held_out_steps": len(truth),
        "held_out_right": float(truth.mean()),
        "auc": _auc(logits, truth),
        "kept": float(kept.float().mean()),
        "right_of_kept": float(truth[kept].mean()),
        "right_of_refused": float(truth[~kept].mean()),
        "weights": [round(w, 5) for w in scorer.weights.tolist()],
    }
    shares = {
        "right, training": "right",
        "right, held out": "held_out_right",
        f"kept at {THRESHOLD}, held out": "kept",
        "right of those kept": "right_of_kept",
        "right of those refused": "right_of_refused",
    }
    rows = [
        ["steps, training / held out", f"{len(right)} / {len(truth)}"],
        ["area under the curve, held out", f"{results['auc']:.3f}"],
        *[[f"{name}, %", f"{100 * results[key]:.1f}"] for name, key in shares.items()],
    ]
    text = (
        "RSD's reward: a logistic head on the target's last hidden state at the end of a step "
        "(the paper: a model of 1.5 billion parameters of its own). Steps of draft and target, "
        f"greedy and at T = 0.7, on {problems} new arithmetic problems; a step is right if its "
        "result is true and is the one needed there; up to the first wrong one. Held out: other "
        "problems (validation).\n\n" + table(["", ""], rows)
    )
    save("rsd-scorer", provenance(target, problems=problems, threshold=THRESHOLD), results, text)


def _examples(
    target: forerun.Model, draft: forerun.Model, scorer: Scorer, split: str, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(n, d)` states behind the steps that both models wrote, and `(n,)` 1 where one is right."""
    rng, texts, labels = random.Random(f"rsd/{split}"), [], []
    made: list[Problem] = [arithmetic.sample(rng, split, Pool()) for _ in range(count)]
    for model in (draft, target):
        for temperature in (0.0, 0.7):
            how = {"temperature": temperature, "max_new_tokens": arithmetic.MAX_NEW_TOKENS}
            done = model.generate(
                [p.prompt for p in made], plain=True, batch_size=64, sampling=coins(count, **how)
            )
            for problem, answer in zip(made, done, strict=True):
                cuts = _cuts(model, answer.tokens)
                steps = [model.tokenizer.decode(answer.tokens[a:b]) for a, b in cuts]
                worked = re.findall(r".*?\.", problem.answer.partition(" The answer")[0])
                verdicts = verdict([s.strip() for s in steps], worked)
                prompt = model.encode(problem.prompt)
                texts += [prompt + answer.tokens[:b] for _, b in cuts[: len(verdicts)]]
                labels += verdicts
    return scorer.states(texts), torch.tensor(labels, dtype=torch.float32)


def _cuts(model: forerun.Model, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Where steps begin and end."""
    (end,) = model.encode(END)
    ends = [i + 1 for i, token in enumerate(tokens) if token == end]
    return list(zip([0, *ends], ends, strict=False))


def _fitted(states: torch.Tensor, right: torch.Tensor, ridge: float = 1e-3) -> torch.Tensor:
    """Logistic regression on states of unit variance; weights for the states as they are."""
    mean, scale = states.mean(0), states.std(0).clamp(min=1e-6)
    unit = torch.cat([(states - mean) / scale, torch.ones(len(states), 1)], 1)
    weights = torch.zeros(unit.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(unit @ weights, right)
        value = value + ridge * weights[:-1].square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    head = weights.detach()[:-1] / scale
    return torch.cat([head, weights.detach()[-1:] - (head @ mean)])


def _auc(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Chance that a right step has more than a wrong one."""
    ranks = np.empty(len(logits))
    ranks[logits.argsort().numpy()] = np.arange(1, len(logits) + 1)
    good = right.bool().numpy()
    count = good.sum()
    return float((ranks[good].sum() - count * (count + 1) / 2) / (count * (len(good) - count)))
