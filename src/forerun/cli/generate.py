"""`forerun generate`."""

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from forerun.cli.shared import faces, options
from forerun.cli.shared.console import remark, status
from forerun.cli.shared.models import ChatByDefault, Models, PolicyOptions
from forerun.cli.shared.options import MODELS, OUTPUT, SAMPLING, Fields, flag, option
from forerun.cli.shared.report import claim
from forerun.errors import SettingError
from forerun.prompts import Prompt, read_file, read_text
from forerun.requests import Sampling

MANY_PROMPTS = "Many prompts"
NO_OPTIONS = ("eos", "constraint", "allowed_tokens", "processor", "stopping")
"""Of sampling: what a command line cannot say."""


@options.command
def generate(
    models: Annotated[Models, Fields(Models)],
    sampling: Annotated[dict[str, Any], Fields(Sampling, SAMPLING, without=NO_OPTIONS)],
    chat: Annotated[ChatByDefault, Fields(ChatByDefault)],
    policies: Annotated[PolicyOptions, Fields(PolicyOptions)],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT")] = None,
    language: Annotated[str | None, option("CODE", panel=MODELS)] = None,
    decoder_prompt: Annotated[str | None, option("TEXT", panel=MODELS)] = None,
    prompt_file: Annotated[str | None, option("FILE", panel=MANY_PROMPTS)] = None,
    batch_size: Annotated[int, option("B", "Prompts decoded together.", panel=MANY_PROMPTS)] = 16,
    compare: Annotated[bool, flag("--compare", panel=OUTPUT)] = False,
    rounds: options.Rounds = False,
    logprobs: Annotated[int | None, option("N", panel=OUTPUT)] = None,
    as_json: options.Json = False,
    as_lines: Annotated[bool, flag("--jsonl", panel=OUTPUT)] = False,
    output: Annotated[str | None, options.output("FILE")] = None,
) -> None:
    """Write text with a model that runs ahead of itself.

    Colours say who wrote each token. The text goes to stdout, everything else to stderr.

    Args:
        prompt: the text to continue, or with an encoder-decoder model to translate or sum up; -
            reads stdin.
        language: of translation models: the language to write in.
        decoder_prompt: of encoder-decoder models: what the text shall begin with; not printed.
        prompt_file: many prompts, one JSON string or object per line ({"prompt": "...", "id": "a1",
            "temperature": 0.7}); - reads stdin. With an encoder-decoder model "source" is another
            name of "prompt". Each text has a line ==> prompt 1 (a1) <== above; programs better read
            --jsonl.
        compare: also decode plainly; print speed-up and sameness.
        logprobs: in JSON, the log-probability of every token and of the N likeliest there.
        as_lines: print one JSON object per prompt, on a line, as it finishes; for many prompts.
        output: add the lines of --jsonl to a file. Prompts that it holds are left out, so the same
            command goes on after an interrupt.
    """
    if as_lines and (as_json or compare):
        raise SettingError("--jsonl writes a line per prompt; leave --json and --compare out")
    if output is not None and not as_lines:
        raise SettingError("-o saves what --jsonl writes; add --jsonl")
    if logprobs is not None and not (as_json or as_lines):
        raise SettingError("--logprobs is part of JSON; add --json or --jsonl")
    if prompt is not None and prompt_file is not None:
        raise SettingError("give a prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None:
        raise SettingError('no prompt; write forerun generate "Once upon a time", or - for stdin')
    claim(output)
    if prompt == "-":
        prompt = read_text(prompt).removesuffix("\n")
    prompts = [Prompt(prompt)] if prompt is not None else read_file(str(prompt_file))
    common = options.sampling(sampling)
    with status("loading"):
        how = policies.resolve(models.draft)
    learns = not compare if policies.remember is None else policies.remember
    job, prompts = models.open(prompts, common, how, batch_size, chat=chat, remember=learns)
    job.model.opening = job.model.open(language, decoder_prompt)
    watched = sys.stdout.isatty() and not (as_json or as_lines)
    job = replace(job, logprobs=logprobs, first_token_soon=watched)
    if policies.settings is not None:
        used = "{controller}, {rule}, draft {draft}".format_map(job.about)
        remark(f"{policies.settings}: {used}")
    if job.about["chat"] and not chat.chat:
        remark("the model's chat template is around the prompt; --raw leaves it out")
    if compare:
        faces.warm_up(job, prompts[0])
    if as_lines:
        face: faces.Face = faces.Lines(job, prompts, rounds, output)
    elif as_json:
        face = faces.JsonDocument(job, prompts)
    else:
        kind = faces.Growing if prompt_file is None else faces.Finished
        face = kind(job, prompts, rounds)
    faces.play(job, face, compare)
