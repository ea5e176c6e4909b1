"""How near a GGUF file's logits on openvino are to those of `transformers`' dequantised model.

``python -m benchmarks.gguf_agreement MODEL.gguf``: positions, share with the same best token, and
how far apart the reference's two best were where another won.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from forerun.runtime import load_model, load_tokenizer
from forerun.runtime.openvino.load import from_name

CHUNK = 100
"""Tokens of a text; each is read by itself."""


def compared(name: str, positions: int) -> dict[str, float]:
    """Agreement over texts of this repository's documents."""
    root = Path(__file__).parent.parent
    text = "\n".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))
    ids = load_tokenizer(name).encode(text)[:positions]
    texts = [ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK)]
    executor = from_name(name, threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(name, "cpu", "float32")
    same, gaps, largest = 0, [0.0], 0.0
    for piece in texts:
        got = executor.run([0], [piece], [len(piece)])[0]
        executor.keep([], [])
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([piece])).logits[0].float()
        largest = max(largest, float((got - wanted).abs().max()))
        for ours, theirs in zip(got, wanted, strict=True):
            if int(ours.argmax()) == int(theirs.argmax()):
                same += 1
            else:
                two = theirs.topk(2).values
                gaps.append(float(two[0] - two[1]))
    return {
        "positions": len(ids),
        "same best token": same / len(ids),
        "largest gap where another won": max(gaps),
        "largest difference of logits": largest,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--positions", type=int, default=2000)
    given = parser.parse_args()
    for what, value in compared(given.model, given.positions).items():
        print(f"{what}: {value:.4g}")
