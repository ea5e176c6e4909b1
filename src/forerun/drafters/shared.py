"""`shared`: a shallow decoder on the target's encoder drafts; made by train-draft."""

from dataclasses import dataclass
from typing import Any

from forerun.drafters.base import Drafter, TrainedDraft
from forerun.drafters.model import ModelDrafter
from forerun.runtime.base import Rows
from forerun.runtime.grafts import load_graft, model_of


@dataclass(frozen=True)
class SharedDraft(TrainedDraft):
    """One or two decoder layers on the states of an encoder-decoder target's encoder.

    Reference: after the reduced decoder of the drafter of Sen et al. 2025 (CM-ASD) [cmasd2025] and
    the shared encoders of Gandhi et al. 2023 (distil-Whisper) [gandhi2023].
    """

    on_encoder = True

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        made, _ = load_graft(model_of(target, self.kind), self.folder(target.facts.name), self.kind)
        return ModelDrafter(Rows(target.executor.beside(made)), target.vocab_size)
