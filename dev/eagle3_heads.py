"""Make the heads in tests/data/eagle3 with the `speculators` package: untrained, tiny, saved by its
own `save_pretrained`, with what the package's own forward says of them.

It wants an older transformers than the library's, so an environment of its own::

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 "transformers<5.16" loguru pydantic-settings openai datasets
    ENV/bin/pip install --no-deps speculators==0.9.0 hs-connectors
    ENV/bin/python dev/eagle3_heads.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "eagle3"
VOCAB, WIDTH, TOKENS, STEPS = 97, 32, 12, 3
"""As of the targets in tests/tiny.py; a text, and tokens of a draft."""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
HEADS = {
    "llama": (LlamaConfig(**SIZES, head_dim=8), 40, {}),
    "qwen3": (
        Qwen3Config(**SIZES, head_dim=16, layer_types=["full_attention"]),
        40,
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    "whole": (LlamaConfig(**SIZES, head_dim=8, rope_parameters=SCALED), VOCAB, {"fc_norm": True}),
}
"""By name the layer, how many tokens a head says, and its variant."""


def made(layer: LlamaConfig | Qwen3Config, count: int, flags: dict[str, bool]) -> Eagle3DraftModel:
    """A random head, of numbers that bfloat16 holds."""
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=count,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    model = Eagle3DraftModel(config)
    for weight in model.parameters():
        wide = weight.dim() > 1
        torch.nn.init.normal_(weight, mean=0.0 if wide else 1.0, std=0.3 if wide else 0.2)
        weight.data = weight.bfloat16().float()
    if count < VOCAB:
        ids = torch.randperm(VOCAB)[:count].sort().values
        model.t2d[ids] = True
        model.d2t.copy_(ids - torch.arange(count))
    return model.eval()


@torch.no_grad()
def main() -> None:
    """Save all heads, and what they say."""
    for seed, (name, (layer, count, flags)) in enumerate(HEADS.items()):
        torch.manual_seed(seed)
        model = made(layer, count, flags)
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _, __, out, to=logits: to.append(out[0]))
        ids = torch.randint(3, VOCAB, (1, TOKENS))
        states = torch.randn(1, TOKENS, 3 * WIDTH)
        documents = torch.zeros(1, TOKENS, dtype=torch.long)
        model(states, ids, documents, ttt_steps=STEPS)
        model.bfloat16().save_pretrained(FOLDER / name)
        (FOLDER / name / "config.py").unlink()  # a copy of the package's own code
        own = {"ids": ids[0], "states": states[0], "logits": torch.stack(logits)}
        save_file(own, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    main()
