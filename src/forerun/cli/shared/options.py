"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MODELS = "Models"
SPECULATION = "Speculation"
PROMPTS = "Prompts"
SAMPLING = "Sampling"
COSTS = "Costs"
OUTPUT = "Output"
VALIDATION = "The shipped ones are those of split val. Default for the shipped target: builtin."
"""More about the prompts of commands that choose settings."""


def option(metavar: str, help: str, *names: str, panel: str | None = None) -> Any:
    """An option with a value; its names are those of the parameter unless given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """An option that is there or not."""
    return option("", help, name, panel=panel)


def output(metavar: str, help: str) -> Any:
    """Where a result goes."""
    return option(metavar, help, "-o", "--output", panel=OUTPUT)


def prompts(more: str = "") -> Any:
    """The prompts of a lab command, as `cli.shared.prompts.find_prompts` takes them."""
    text = "A file as for generate --prompt-file (- reads stdin), or the shipped prompts of one "
    text += f"family or, with builtin alone, of all. {more}"
    return option("FILE|builtin:FAMILY", text.strip(), panel=PROMPTS)


def limit(more: str = "") -> Any:
    """How many prompts."""
    text = f"Only the first N prompts of each family; a file is one if its lines name none. {more}"
    return option("N", text.strip(), panel=PROMPTS)


Target = Annotated[
    str | None,
    option(
        "ID_OR_PATH",
        "A folder, a Hugging Face id, or translator or digest, which ship. Default: the shipped "
        "one.",
        panel=MODELS,
    ),
]
Draft = Annotated[
    str | None,
    option(
        "ID_OR_PATH|SPEC",
        "Who runs ahead: a smaller model, or a drafter like lookup(n=3) or none. Default: the "
        "shipped draft for the shipped target, shared or block where the target's folder has one, "
        "else lookup.",
        panel=MODELS,
    ),
]
DraftModel = Annotated[
    str | None,
    option(
        "ID_OR_PATH",
        "Its draft model. Default: the shipped draft for the shipped target.",
        panel=MODELS,
    ),
]
Runtime = Annotated[
    str | None,
    option(
        "SPEC",
        "What runs the models: torch, openvino, cudagraphs, auto, or e.g. "
        "\"openvino(precision='int8')\". Default: FORERUN_RUNTIME, or else auto (openvino on a CPU "
        "where it is installed and serves the model); torch for --draft specbound, adadecode and "
        "kangaroo.",
        panel=MODELS,
    ),
]
Device = Annotated[
    str | None, option("D", "cpu, cuda, cuda:1, ... Default: a GPU if any.", panel=MODELS)
]
Dtype = Annotated[
    str | None,
    option(
        "T", "auto, float32, bfloat16 or float16. Default: as the model was saved.", panel=MODELS
    ),
]
TrustRemoteCode = Annotated[
    bool, flag("--trust-remote-code", "Run code that comes with a checkpoint.", MODELS)
]

Controller = Annotated[
    str | None,
    option(
        "SPEC",
        "How far to run ahead, like gammatune(eta=0.3). Default: auto.",
        panel=SPECULATION,
    ),
]

Split = Annotated[
    str,
    option(
        "val|test",
        "Of the shipped prompts: val to develop on, test to report on.",
        panel=PROMPTS,
    ),
]
Limit = Annotated[int | None, limit()]
MaxNewTokens = Annotated[
    int, option("N", "Most tokens to write; less where a prompt asks for less.", panel=PROMPTS)
]
OwnMaxNewTokens = Annotated[
    int | None,
    option("N", "Most tokens per prompt. Default: as the prompt says, or 128.", panel=PROMPTS),
]

Temperature = Annotated[float, option("T", "0 is greedy; higher is more random.", panel=SAMPLING)]
TopK = Annotated[int, option("K", "Keep the K most likely tokens; 0 keeps all.", panel=SAMPLING)]
TopP = Annotated[
    float, option("P", "Keep the smallest set with this much probability.", panel=SAMPLING)
]
MinP = Annotated[
    float, option("P", "Drop tokens below P times the highest probability.", panel=SAMPLING)
]
IgnoreEos = Annotated[bool, flag("--ignore-eos", "Go on after the end of text.", SAMPLING)]

CostTable = Annotated[
    str,
    option(
        "FILE|c=10,slope=0.02",
        "What a round costs: a file of forerun costs, or made up: c draft steps per target pass, "
        "slope and fixed in target passes.",
        panel=COSTS,
    ),
]
NearBatch = Annotated[int, option("B", "Choose the costs nearest to this batch.", panel=COSTS)]
NearContext = Annotated[int, option("N", "And of those nearest to this context.", panel=COSTS)]

Json = Annotated[bool, flag("--json", "Print one JSON document and nothing else.", OUTPUT)]
