"""`forerun audit --precision`: texts in another precision against those in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.cli.shared.console import note, stdout, table
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.cli.shared.models import Chat, Models
    from forerun.prompts import Prompt

PRECISIONS = ("bf16", "int8")
ROWS = {
    "how far the logits moved": "moved",
    "gap of the two best, all positions": "gaps_all",
    "gap where another is best": "gaps_where_best_differs",
    "gap where texts part": "gaps_where_texts_part",
}


def in_both(models: Models, precision: str) -> tuple[Models, Models]:
    """The target alone in float32 and in another precision, both on the runtime named.

    Raises:
        SettingError: an unknown precision, or one that the runtime does not have.
    """
    require(precision in PRECISIONS, "--precision", precision, " or ".join(PRECISIONS))
    from forerun.runtime.runtimes import RUNTIMES, OpenVINORuntime, TorchRuntime

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


def precision_audit(
    models: Models,
    precision: str,
    prompts: Sequence[Prompt],
    chat: Chat,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Compare, and print the table or the document.

    Args:
        models: names the target, its runtime and its device.
        precision: of `PRECISIONS`.
        prompts: the prompts.
        chat: what is put around them.
        settings: how they were chosen, for the document.
        as_json: print one JSON document.
    """
    from forerun.lab.precision import AuditedText, compare, summary
    from forerun.lab.provenance import versions

    exact, other = in_both(models, precision)
    first, rows = exact.open(prompts, chat=chat)
    second = other.load()
    run = compare(
        first.model, second.model, [row.ids for row in rows], [row.sampling for row in rows]
    )
    texts: list[AuditedText] = []
    with progress("comparing", len(rows), "texts") as tell:
        for text in run:
            texts.append(text)
            tell("comparing", len(texts))
    result = summary(texts)
    if as_json:
        names = ("target", "runtime", "device")
        about = {name: second.about[name] for name in names} | {"precision": second.about["dtype"]}
        parted = [
            {
                "id": rows[text.prompt].id,
                "family": rows[text.prompt].family,
                "first_difference": text.first,
                "other_best": [{"position": at, "gap": text.gaps[at]} for at in text.other],
            }
            for text in texts
            if text.first is not None or text.other
        ]
        document = {"schema": 1, **result, "differences": parted}
        print_json({**document, "settings": {**about, **settings}, "versions": versions()})
        return
    _show(result, second.about["dtype"])


def _show(result: dict[str, Any], name: str) -> None:
    console = stdout()
    shown = table(f"{name} against float32", right=("median", "99 %", "largest"))
    for label, key in ROWS.items():
        values = result[key]
        cells = ["–"] * 3 if values is None else [f"{x:.4f}" for x in values.values()]
        shown.add_row(label, *cells)
    console.print(shown)
    note(
        console,
        f"\n{result['texts_differ']} of {result['texts']} texts differ; another token is best at "
        f"{result['positions_differ']:,} of {result['positions']:,} positions",
    )
