"""`forerun audit`: is speculative text the text of plain decoding?"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import collected, note, one_line, remark, stdout, table
from forerun.cli.shared.models import Chat, Job, Models, PolicyOptions
from forerun.cli.shared.options import SAMPLING, SPECULATION, Fields, option
from forerun.cli.shared.report import print_json
from forerun.errors import ModelError, SettingError, UnknownNameError, require
from forerun.lab import server_audit
from forerun.lab.bench.peers import Peer, named
from forerun.lab.bench.report import Document
from forerun.prompts import Prompt, default_source, find_prompts, seeded
from forerun.settings import Settings

PEERS = ("transformers",)  # choices of --peer
TRANSFORMERS = (
    "transformers",
    "transformers-assisted(constant,5)",
    "transformers-assisted(heuristic,5)",
)
"""What is compared: plain, and assisted with a fixed and a varying length."""
SHIPPED_LIMIT, SHIPPED_TOKENS = 10, 128
"""Shipped prompts of each family compared by default, and tokens that a server is asked for."""
PRECISIONS = ("bf16", "int8")
MOVES = {
    "how far the logits moved": "moved",
    "gap of the two best, all positions": "gaps_all",
    "gap where another is best": "gaps_where_best_differs",
    "gap where texts part": "gaps_where_texts_part",
}
"""Rows of the table of `--precision`, and their names in its document."""
SERVERS = "A server instead of a model"
COLOURS = {
    "near-tie": "yellow", "bug": "bold red", "differs": "red",
    "other text": "red", "fault": "bold red",
}  # fmt: skip
KEY = "OPENAI_API_KEY"


@options.command
def audit(
    models: Annotated[Models, Fields(Models)],
    chat: Annotated[Chat, Fields(Chat)],
    policies: Annotated[PolicyOptions, Fields(PolicyOptions, only=("controller",))],
    prompts: Annotated[
        str | None, options.prompts("Default for the shipped target: builtin.")
    ] = None,
    split: options.Split = "test",
    limit: Annotated[
        int | None, options.limit(f"Default: all, or without --prompts {SHIPPED_LIMIT}.")
    ] = None,
    max_new_tokens: options.OwnMaxNewTokens = None,
    rule: Annotated[str, option("SPEC", panel=SPECULATION)] = "gumbel",
    temperature: Annotated[float, option("T", panel=SAMPLING)] = 0.0,
    batch_size: Annotated[int, option("B")] = 8,
    peer: Annotated[str | None, option("transformers")] = None,
    precision: Annotated[str | None, option("bf16|int8")] = None,
    server: Annotated[str | None, option("URL", panel=SERVERS)] = None,
    against: Annotated[str | None, option("URL", panel=SERVERS)] = None,
    as_json: options.Json = False,
) -> None:
    """Compare speculative with plain decoding, token by token.

    At each first difference the logits are recomputed in several shapes: it is a floating-point
    near-tie, or a bug. The exit code is 1 if there is a bug.

    Args:
        rule: what to keep; a lossless rule.
        temperature: above 0 prompt i draws by the noise of seed i, drafted or not; rule gumbel
            only.
        batch_size: also compare ragged batches of B prompts with each prompt alone; 1 does not.
        peer: also compare generate of transformers, plain and assisted by the draft.
        precision: instead, compare plain texts in this precision with those in float32: how often
            they differ, and how close the two best tokens were there. int8 needs --runtime
            openvino.
        server: instead, audit an OpenAI-compatible server by its log-probabilities (key:
            OPENAI_API_KEY): greedy texts with speculation against those without.
        against: the server of the same model without speculation. Default: the same one, if it is
            forerun's.
    """
    if peer is not None and peer not in PEERS:
        raise UnknownNameError.among("peer", peer, PEERS)
    require(batch_size >= 1, "batch size", batch_size, "≥ 1")
    if against is not None and server is None:
        raise SettingError("--against needs --server URL")
    if server is None:
        _check_temperature(temperature, rule, peer or precision)
    where = default_source(prompts, None if server else models.target)
    limit = SHIPPED_LIMIT if prompts is None and limit is None else limit
    requested = find_prompts(where, split, limit, max_new_tokens, penalised=server is None)
    settings: dict[str, Any] = {"prompts": where, "split": split, "limit": limit}
    settings["max_new_tokens"] = max_new_tokens
    if server is not None:
        return _servers(server, against, requested, settings, as_json)
    chosen = seeded(requested, 0)
    if precision is not None:
        return _precisions(_in_both(models, precision), chosen, chat, settings, as_json)

    from forerun.lab import audit as lab

    lab.check_lossless(rule)
    common, how = {"temperature": temperature}, Settings(policies.controller, rule)
    job, rows = models.open(chosen, common, how, batch_size, chat=chat)
    for row in rows if peer else ():
        lab.check_common(replace(row.sampling, temperature=0.0))  # as it is audited then
    with ExitStack() as stack:
        peers = _peers(stack, job, models) if peer else []
        run = lab.audit(
            job.model,
            [row.ids for row in rows],
            [row.sampling for row in rows],
            controller=job.controller,
            rule=job.rule,
            batch_size=batch_size,
            peers=peers,
        )
        count = len(rows) * len(lab.checks(batch_size, peers))
        done, interrupted = collected(run, "comparing", count, "texts")
    about = {**job.about, **settings, "peer": peer, **common}
    document = lab.document(job.model, rows, done, not interrupted, about)
    if as_json:
        print_json(document)
    else:
        _show(document)
    _leave(interrupted, document["bugs"] > 0)


def _leave(interrupted: bool, bad: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt
    if bad:
        raise typer.Exit(1)


def _check_temperature(temperature: float, rule: str, greedy: str | None) -> None:
    """Refuse to sample where `greedy` texts are compared, or texts that coins decide."""
    from forerun.rules import RULES

    options.sampling({"temperature": temperature})
    if temperature and greedy:
        raise SettingError(f"{greedy} is audited greedily; leave it or --temperature out")
    if temperature and not RULES.make(rule).gumbel_max:
        raise SettingError(f"rule {rule!r} tosses coins, so that texts differ; audit it greedily")


def _peers(stack: ExitStack, job: Job, models: Models) -> list[Peer]:
    """Peers of transformers that can run; the others are named on stderr."""
    from forerun.cli.bench import start_peers

    peers = [one for name in TRANSFORMERS for one in named(name, {})]
    able, skipped = start_peers(stack, job, models, peers)
    for skip in skipped:
        remark(f"{skip['name']} is left out: {skip['reason']}")
    if not able:
        raise ModelError("no peer can run with this target; leave --peer out")
    return able


def _show(document: Document) -> None:
    """The differences, four lines each, and a table of the checks."""
    console = stdout()
    for one in document["differences"]:
        check, against = one["check"], one["against"]
        where = f"{one['id']}: {check} leaves {against} at output token {one['position']}"
        what = (one["kind"], COLOURS[one["kind"]]), f"  {where} ({one['reason']})"
        console.print(Text.assemble(*what), soft_wrap=True)
        before = f"  … {one_line(one['text']['before'])}"
        console.print(Text(before, "dim"), soft_wrap=True)
        width = max(len(check), len(against))
        for name, text in zip((against, check), one["text"]["onward"][::-1], strict=True):
            line = (f"    {name:<{width}}  ", "dim"), one_line(text) or "(end)"
            console.print(Text.assemble(*line), soft_wrap=True)
        console.print()
    counted = ["compared", "identical", "near-ties", "bugs", *["differ"] * (document["differ"] > 0)]
    shown = table("check", "against", right=counted)
    for n in document["checks"]:
        counts = (f"{n[name.replace('-', '_')]:,}" for name in counted)
        shown.add_row(n["check"], n["against"], *counts)
    console.print(shown)
    console.print()
    note(Text(document["summary"], "bold red" if document["bugs"] else "bold"))


def _in_both(models: Models, precision: str) -> tuple[Models, Models]:
    """The target alone in float32 and in another precision, both on the runtime named;
    `SettingError` if it has none such."""
    from forerun.runtime.runtimes import RUNTIMES, OpenVINORuntime, TorchRuntime

    require(precision in PRECISIONS, "--precision", precision, " or ".join(PRECISIONS))
    runtime = RUNTIMES.make(models.runtime or "torch")
    exact = replace(models, draft="none", dtype="float32")
    if isinstance(runtime, OpenVINORuntime):
        names = [RUNTIMES.text(replace(runtime, precision=p)) for p in ("fp32", precision)]
        return replace(exact, runtime=names[0]), replace(exact, runtime=names[1])
    if not isinstance(runtime, TorchRuntime):
        raise SettingError(
            f"--precision compares on torch or openvino, got --runtime {models.runtime}"
        )
    if precision == "int8":
        raise SettingError("torch has no int8 weights here; add --runtime openvino")
    exact = replace(exact, runtime="torch")
    return exact, replace(exact, dtype="bfloat16")


def _precisions(
    both: tuple[Models, Models], asked: list[Prompt], chat: Chat, settings: Document, as_json: bool
) -> None:
    """Compare a model with itself in another precision, and print the table or the document."""
    from forerun.lab.precision import compare, summary
    from forerun.lab.provenance import versions

    first, rows = both[0].open(asked, chat=chat)
    second = both[1].load()
    ids, samplings = [row.ids for row in rows], [row.sampling for row in rows]
    run = compare(first.model, second.model, ids, samplings)
    texts, interrupted = collected(run, "comparing", len(rows), "texts")
    result, name = summary(texts), second.about["dtype"]
    if as_json:
        about = {key: second.about[key] for key in ("target", "runtime", "device")}
        parted = []
        for text in texts:
            if text.first is not None or text.other:
                named = {name: getattr(rows[text.prompt], name) for name in ("id", "family")}
                other = [{"position": at, "gap": text.gaps[at]} for at in text.other]
                parted.append({**named, "first_difference": text.first, "other_best": other})
        settings = {**about, "precision": name, **settings}
        document = {"schema": 1, **result, "differences": parted, "settings": settings}
        print_json({**document, "versions": versions()})
    else:
        shown = table(f"{name} against float32", right=("median", "99 %", "largest"))
        for label, key in MOVES.items():
            values = map("{:.4f}".format, result[key].values()) if result[key] else ["–"] * 3
            shown.add_row(label, *values)
        stdout().print(shown)
        note(
            f"\n{result['texts_differ']} of {result['texts']} texts differ; another token is best "
            f"at {result['positions_differ']:,} of {result['positions']:,} positions"
        )
    _leave(interrupted, False)


def _servers(
    url: str, against: str | None, prompts: list[Prompt], settings: Document, as_json: bool
) -> None:
    """Ask a server, and another or the same without speculation; print differences or a
    document."""
    key = os.environ.get(KEY)
    server = server_audit.OpenAIServer(url, key)
    plain = server_audit.forerun_plain
    other = server_audit.OpenAIServer(against, key) if against else plain(server, key)

    def asked() -> Iterator[Any]:
        for prompt in prompts:
            most = int(prompt.settings.get("max_new_tokens", SHIPPED_TOKENS))
            yield server.write(prompt.content, most), other.write(prompt.content, most)

    pairs, interrupted = collected(asked(), "asking", len(prompts), "prompts")
    _leave(interrupted and not pairs, False)
    compared = server_audit.compare(pairs)
    counts = Counter(c.outcome for c in compared)
    line = f"{counts['identical']:,} of {len(compared):,} identical" + "".join(
        f", {counts[name]:,} {name}" for name in ("near-tie", "other text", "fault")
    )
    differing = [(prompts[c.prompt], c) for c in compared if c.position is not None]
    if as_json:
        differences = [{"family": p.family, "id": p.id, **asdict(c)} for p, c in differing]
        print_json({
            "schema": 1, "summary": line, "compared": len(compared), "differences": differences,
            "settings": {"server": url, "against": against, **settings},
        })  # fmt: skip
    else:
        for prompt, c in differing:
            tokens = " / ".join("(end)" if t is None else repr(one_line(t)) for t in c.tokens)
            what = f"  {prompt.id}: at output token {c.position} {tokens}: {c.reason}"
            kind = (c.outcome, COLOURS[c.outcome])
            stdout().print(Text.assemble(kind, what), soft_wrap=True)
        note(Text(line, "bold"))
    _leave(interrupted, counts["other text"] + counts["fault"] > 0)
