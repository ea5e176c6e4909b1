"""`forerun generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from forerun.cli.shared import options
from forerun.cli.shared.console import note, status, stderr
from forerun.cli.shared.options import MODELS, OUTPUT, SAMPLING, SPECULATION, flag, option
from forerun.errors import SettingError

MANY_PROMPTS = "Many prompts"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to continue, or with an encoder-decoder model to translate or sum up; "
            "- reads stdin.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        option(
            "ID_OR_PATH",
            "The model to speed up: a folder, a Hugging Face id, or translator (English to "
            "German) or digest (synthetic), which ship. Default: the shipped one.",
            panel=MODELS,
        ),
    ] = None,
    draft: options.Draft = None,
    exits: Annotated[
        str | None,
        option(
            "DIR",
            "Exit heads for --draft specbound, made by train-exits. Default: the shipped ones for "
            "the shipped target, else the model's own head at every layer.",
            panel=MODELS,
        ),
    ] = None,
    language: Annotated[
        str | None,
        option("CODE", "Of translation models: the language to write in.", panel=MODELS),
    ] = None,
    decoder_prompt: Annotated[
        str | None,
        option(
            "TEXT",
            "Of encoder-decoder models: what the text shall begin with; not printed.",
            panel=MODELS,
        ),
    ] = None,
    controller: options.Controller = None,
    rule: Annotated[
        str | None,
        option(
            "SPEC",
            "What to keep; forerun list rules says which are lossless. Default: gumbel.",
            panel=SPECULATION,
        ),
    ] = None,
    settings: Annotated[
        str | None,
        option(
            "FILE",
            "Controller, rule and draft from a file of forerun tune, where no option gives them.",
            panel=SPECULATION,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, option("N", "Most tokens to write, at least 1.", panel=SAMPLING)
    ] = 128,
    min_new_tokens: Annotated[
        int, option("N", "No end of text before this many tokens.", panel=SAMPLING)
    ] = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: Annotated[
        float,
        option("X", "Above 1 makes tokens already in the text unlikely.", panel=SAMPLING),
    ] = 1.0,
    presence_penalty: Annotated[
        float, option("X", "Subtracted from logits of tokens in the output.", panel=SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, option("X", "Likewise, once per occurrence.", panel=SAMPLING)
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        option("ID=VALUE", "Add VALUE to a token's logit; repeatable.", panel=SAMPLING),
    ] = None,
    seed: Annotated[
        int | None,
        option("S", "Of the random numbers; the same gives the same.", panel=SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None, option("STR", "End before this text; repeatable.", panel=SAMPLING)
    ] = None,
    ignore_eos: options.IgnoreEos = False,
    prompt_file: Annotated[
        str | None,
        option(
            "FILE",
            "Many prompts, one JSON string or object per line "
            '({"prompt": "...", "id": "a1", "temperature": 0.7}); - reads stdin. With an '
            'encoder-decoder model "source" is another name of "prompt". Each text has a '
            "line ==> prompt 1 (a1) <== above; programs better read --jsonl.",
            panel=MANY_PROMPTS,
        ),
    ] = None,
    batch_size: Annotated[int, option("B", "Prompts decoded together.", panel=MANY_PROMPTS)] = 16,
    compare: Annotated[
        bool,
        flag("--compare", "Also decode plainly; print speed-up and sameness.", OUTPUT),
    ] = False,
    rounds: Annotated[bool, flag("--rounds", "Print one line per round.", OUTPUT)] = False,
    logprobs: Annotated[
        int | None,
        option(
            "N",
            "In JSON, the log-probability of every token and of the N likeliest there.",
            panel=OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
    as_lines: Annotated[
        bool,
        flag(
            "--jsonl",
            "Print one JSON object per prompt, on a line, as it finishes; for many prompts.",
            OUTPUT,
        ),
    ] = False,
    output: Annotated[
        str | None,
        options.output(
            "FILE",
            "Add the lines of --jsonl to a file. Prompts that it holds are left out, so the same "
            "command goes on after an interrupt.",
        ),
    ] = None,
    runtime: options.Runtime = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write text with a model that runs ahead of itself.

    Colours say who wrote each token. The text goes to stdout, everything else to stderr.
    """
    from forerun.cli.shared.inputs import make_sampling, parse_bias, prepare, read_requests
    from forerun.cli.shared.report import check_writable

    if as_lines and (as_json or compare):
        raise SettingError("--jsonl writes a line per prompt; leave --json and --compare out")
    if output is not None and not as_lines:
        raise SettingError("-o saves what --jsonl writes; add --jsonl")
    if logprobs is not None and not (as_json or as_lines):
        raise SettingError("--logprobs is part of JSON; add --json or --jsonl")
    check_writable(output)
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

        from forerun.cli.shared.run import Plan
        from forerun.drafters.specbound import with_exits
    plan = Plan(
        target,
        draft if exits is None else with_exits(draft, exits),
        controller,
        rule,
        settings=settings,
        batch_size=batch_size,
        runtime=runtime,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        language=language,
        decoder_prompt=decoder_prompt,
    )
    job, rows = plan.open(lambda reader: prepare(reader, requests, common))
    watched = sys.stdout.isatty() and not (as_json or as_lines)
    job = replace(job, logprobs=logprobs, first_token_soon=watched)
    if settings is not None:
        used = "{controller}, {rule}, draft {draft}".format_map(job.about)
        note(stderr(), f"{settings}: {used}")
    if as_lines:
        from forerun.cli.shared.lines import play_lines

        play_lines(job, rows, output, rounds)
        return

    from forerun.cli.shared.play import play

    play(job, rows, many=prompt_file is not None, compare=compare, rounds=rounds, as_json=as_json)
