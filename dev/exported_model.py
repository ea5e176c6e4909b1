"""Make tests/data/exported: a tiny model as optimum exports it for OpenVINO, and its logits.

Needs an environment of its own: ``pip install 'optimum-intel==2.2.0' 'transformers==5.5.*'``; then
``python dev/exported_model.py`` in the repository's root.
"""

import json
import tempfile
from pathlib import Path

import torch
from optimum.intel import OVModelForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

FOLDER = Path("tests/data/exported")

torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2,
    )
).eval()  # fmt: skip
for parameter in model.parameters():
    parameter.data += 0.1 * torch.randn_like(parameter)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    exported = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=True
    )
    exported.save_pretrained(FOLDER)
    (FOLDER / "openvino_config.json").unlink()  # of where it was made
    exported.compile()
    ids = torch.randint(3, 300, (1, 24))
    logits = exported(ids, attention_mask=torch.ones_like(ids)).logits[0]
first = [[round(x, 5) for x in row[:8]] for row in logits.tolist()]
(FOLDER / "logits.json").write_text(json.dumps({"ids": ids[0].tolist(), "logits": first}) + "\n")
