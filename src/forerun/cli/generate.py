"""`forerun generate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forerun.cli.console import status

Text = str | None
MODELS = "Models"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
MANY_PROMPTS = "Many prompts"
OUTPUT = "Output"


def generate(
    prompt: Annotated[
        Text, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")
    ] = None,
    target: Annotated[
        Text,
        typer.Option(
            metavar="ID_OR_PATH",
            help="The model to speed up: a folder or a Hugging Face id. Default: the shipped one.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Annotated[
        Text,
        typer.Option(
            metavar="ID_OR_PATH|SPEC",
            help="Who runs ahead: a smaller model, or a drafter like lookup(n=3) or none. "
            "Default: the shipped draft for the shipped target, lookup for others.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    exits: Annotated[
        Text,
        typer.Option(
            metavar="DIR",
            help="Exit heads for --draft specbound, made by train-exits. Default: the shipped ones "
            "for the shipped target, else the model's own head at every layer.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    controller: Annotated[
        Text,
        typer.Option(
            metavar="SPEC",
            help="How far to run ahead, like gammatune(eta=0.3). Default: gammatune+.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    rule: Annotated[
        Text,
        typer.Option(
            metavar="SPEC",
            help="What to keep; forerun list rules says which are lossless. Default: standard.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    settings: Annotated[
        Text,
        typer.Option(
            metavar="FILE",
            help="Controller, rule and draft from a file of forerun tune, where no option gives "
            "them.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Most tokens to write, at least 1.", rich_help_panel=SAMPLING
        ),
    ] = 128,
    min_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="No end of text before this many tokens.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", help="0 is greedy; higher is more random.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Keep the K most likely tokens; 0 keeps all.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Keep the smallest set with this much probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Drop tokens below P times the highest probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Above 1 makes tokens already in the text unlikely.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Subtracted from logits of tokens in the output.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="Likewise, once per occurrence.", rich_help_panel=SAMPLING),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE",
            help="Add VALUE to a token's logit; repeatable.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            help="Of the random numbers; the same gives the same.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STR", help="End before this text; repeatable.", rich_help_panel=SAMPLING
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            metavar="",
            help="Go on after the end of text.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    prompt_file: Annotated[
        Text,
        typer.Option(
            metavar="FILE",
            help="Many prompts, one JSON string or object per line "
            '({"prompt": "...", "temperature": 0.7}); - reads stdin.',
            rich_help_panel=MANY_PROMPTS,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(metavar="B", help="Prompts decoded together.", rich_help_panel=MANY_PROMPTS),
    ] = 16,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            metavar="",
            help="Also decode plainly; print speed-up and sameness.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    rounds: Annotated[
        bool,
        typer.Option(
            "--rounds", metavar="", help="Print one line per round.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Print one JSON document and nothing else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    device: Annotated[
        Text,
        typer.Option(
            metavar="D",
            help="cpu, cuda, cuda:1, ... Default: a GPU if any.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        Text,
        typer.Option(
            metavar="T",
            help="auto, float32, bfloat16 or float16. Default: as the model was saved.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar="",
            help="Run code that comes with a checkpoint.",
            rich_help_panel=MODELS,
        ),
    ] = False,
) -> None:
    """Write text with a model that runs ahead of itself.

    Colours say who wrote each token. The text goes to stdout, everything else to stderr.
    """
    from forerun.cli.inputs import make_sampling, parse_bias, prepare, read_requests

    requests = read_requests(prompt, prompt_file)
    with status("loading"):
        common: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": parse_bias(logit_bias or []),
            "seed": seed,
            "stop": stop or [],
            "ignore_eos": ignore_eos,
        }
        make_sampling(common)

        from forerun.cli.run import load_job
    job = load_job(
        target,
        draft,
        controller,
        rule,
        settings=settings,
        batch_size=batch_size,
        exits=exits,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    rows = prepare(job.model, requests, common)

    from forerun.cli.play import play

    play(job, rows, many=prompt_file is not None, compare=compare, rounds=rounds, as_json=as_json)
