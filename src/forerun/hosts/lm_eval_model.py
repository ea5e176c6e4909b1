"""A `forerun.Model` as lm-evaluation-harness drives models, for runtimes other than PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from forerun.engine import Completion
from forerun.errors import GenerationError
from forerun.model import Model
from forerun.requests import Sampling

MAX_NEW_TOKENS = 256
"""Of tasks that name no `max_gen_toks`; lm-eval's own."""
DRAWN = ("temperature", "top_p", "top_k", "min_p")


class HarnessModel(TemplateLM):
    """Texts are written speculatively; given texts are scored in plain passes."""

    def __init__(
        self,
        model: Model,
        wrote: Callable[[Sequence[Completion], float], None],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._model, self._wrote, self._settings = model, wrote, settings

    @property
    def eot_token_id(self) -> int:
        """What stands before texts without a context."""
        return min(self._model.eos)

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Token ids, without special ones around."""
        ids: list[int] = self._model.tokenizer.encode(string, add_special_tokens=False)
        return ids

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to where a task ends them; contexts lose their beginning if they are long."""
        prompts, samplings = [], []
        for context, how in (request.args for request in requests):
            most, until = how.get("max_gen_toks", MAX_NEW_TOKENS), how.get("until") or ()
            prompts.append(self.tok_encode(context)[most - self._model.target.limit :])
            drawn = {name: how[name] for name in DRAWN if name in how and how.get("do_sample")}
            samplings.append(Sampling(**drawn, max_new_tokens=most, stop=until))
        began = time.perf_counter()
        done = self._model.generate(prompts, sampling=samplings, **self._settings)
        self._wrote(done, began)
        for completion in done:
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        return [completion.text for completion in done]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is what greedy decoding writes."""
        out = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-self._model.target.limit :]
            scores = self._model.score(ids, top=1)[-len(continuation) :]
            written = zip(ids[-len(scores) :], scores, strict=True)
            greedy = all(token == score.top[0][0] for token, score in written)
            out.append((sum(score.logprob for score in scores), greedy))
        return out

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, in windows of the context."""
        out = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self._model.target.limit - 1, 1
            )
            pieces = [("", *make_disjoint_window(window)) for window in windows]
            out.append(sum(score for score, _ in self._loglikelihood_tokens(pieces)))
        return out
