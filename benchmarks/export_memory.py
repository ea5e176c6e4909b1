"""The most memory that exporting a safetensors checkpoint to OpenVINO takes.

``python -m benchmarks.export_memory [FOLDER] [--precision fp32]`` prints resident GB (`VmHWM`) of a
process with all imports, until the graph is written, and from there to the first pass, beside the
checkpoint's size. Without a folder it is of a made-up Llama in bfloat16 (``--layers 16 --width
1024 --vocab 32000``: 0.67 GB).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHILD = """
import sys
from pathlib import Path
from forerun.runtime.openvino import load, store

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e6

def noted(*entry, written=store.write):
    done = written(*entry)
    print(f"until the graph is written {peak():.2f}")
    return done

store.write = noted
print(f"imports {peak():.2f}")
load.from_name(sys.argv[1], sys.argv[2], threads=1)
print(f"from there to the first pass {peak():.2f}")
"""


def write(folder: Path, layers: int, width: int, vocab: int) -> None:
    """A Llama of random weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    heads, inner = width // 64, 4 * width
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=vocab,
        max_position_embeddings=1024, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        **{f"self_attn.{x}_proj": (width, width) for x in "qkvo"},
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    every = {f"layers.{i}.{name}": size for i in range(layers) for name, size in shapes.items()}
    every |= {"embed_tokens": (vocab, width), "norm": (width,)}
    drawn = {f"model.{n}.weight": (torch.randn(s) * 0.02).bfloat16() for n, s in every.items()}
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})


def main(options: argparse.Namespace) -> None:
    """Write a checkpoint if none is given, and export it in a process of its own."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.folder or Path(made, "model"))
        if not options.folder:
            folder.mkdir()
            write(folder, options.layers, options.width, options.vocab)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"GB: checkpoint {size / 1e9:.2f}", flush=True)
        own: dict[str, Any] = {**os.environ, "FORERUN_CACHE": f"{made}/cache"}
        command = [sys.executable, "-c", CHILD, str(folder), options.precision]
        subprocess.run(command, env=own, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    main(parser.parse_args())
