"""Tuned settings as other engines configure them, as far as they can express them.

Each export searches what the other engine can do, by replaying the controller of ours that does the
same, so it need not be the controller recommended for forerun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun import zoo
from forerun.controllers import CONTROLLERS, Controller
from forerun.errors import UnknownNameError
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.spaces import SPACES, Real, Space, Tokens
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import SearchResult, best_fixed, search
from forerun.registry import Spec, parse

SCHEMA = 1
THRESHOLD: Space = {"length": Tokens(1, 32), "threshold": Real(0, 1)}
"""Of a fixed length that stops where the draft is unsure."""


@dataclass(frozen=True)
class Export:
    """A file for another engine."""

    text: str  # the file's content
    cannot: str  # one line: what the other engine cannot express. It is in the file, too
    specs: tuple[str, ...]  # our controllers that do the same; `fixed(length=0)`: no drafts


@dataclass(frozen=True)
class ExportJob:
    """The inputs of an export."""

    trace: Trace  # validation prompts
    cell: Cell  # costs of a round
    cells: Sequence[Cell]  # costs at every batch size measured
    budget: int = 100
    seed: int = 0

    @property
    def draft(self) -> str:
        """The draft model: an id, the folder of what ships, or the name of a folder or file."""
        identity = self.trace.about.get("draft")
        name = identity.get("name") if isinstance(identity, Mapping) else None
        if name == "shipped":
            return str(zoo.DRAFT)
        return name if isinstance(name, str) and name != "unnamed" else "ID_OR_PATH"

    @property
    def matched(self) -> tuple[int, int] | None:
        """Longest and shortest match of a drafter that copies from the text; None of others."""
        spec = self.trace.about.get("drafter")
        if not isinstance(spec, str):
            return None
        from forerun.drafters import DRAFTERS

        made: Any = DRAFTERS.make(spec)
        return made.n, made.least if spec.startswith("lookup") else 1

    @property
    def sampled(self) -> bool:
        sampling = self.trace.about.get("sampling")
        return isinstance(sampling, Mapping) and bool(sampling.get("temperature"))


def export(engine: str, job: ExportJob) -> Export:
    """The file for an engine; `UnknownNameError` if there is no such export."""
    if engine not in EXPORTS:
        raise UnknownNameError.among("export", engine, EXPORTS)
    return EXPORTS[engine](job)


def vllm(job: ExportJob) -> Export:
    """`speculative_config` of vLLM: the best fixed length of each batch size.

    Parsed by vLLM 0.32 in a test, but for `suffix`, which there needs the package arctic-inference.
    `num_speculative_tokens_per_batch_size` has inclusive ranges; the first starts at 1 and vLLM
    carries the last on. A length holds for its batch size and the smaller ones down to the next:
    between two that were measured the shorter draft is the safer.
    """
    cannot = (
        "vLLM drafts one length for the whole batch: no length per request, no stop on low "
        "confidence; lengths per batch size it has tested with EAGLE and DFlash drafts only, and "
        "older versions do not know them: there take num_speculative_tokens of your batch size"
    )
    rows, ranges = _by_batch(job), list[list[int]]()
    for row in rows:
        batch, length = row["batch"], row["num_speculative_tokens"]
        first = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = batch
        else:
            ranges.append([first, batch, length])
    longest = max(length for _, _, length in ranges)
    config: dict[str, Any] | None = None
    if longest:
        if job.matched is None:
            config = {"method": "draft_model", "model": job.draft}
        elif str(job.trace.about["drafter"]).startswith("suffix"):
            depth = job.matched[0] + longest
            config = {"method": "suffix", "suffix_decoding_max_tree_depth": depth}
        else:
            most, least = job.matched
            config = {"method": "ngram", "prompt_lookup_max": most, "prompt_lookup_min": least}
        config["num_speculative_tokens"] = longest
        if job.sampled and job.matched is None:  # else it drafts greedily, and accepts less
            config["draft_sample_method"] = "probabilistic"
        if len(ranges) > 1:
            config["num_speculative_tokens_per_batch_size"] = ranges
    use = 'LLM(..., speculative_config=document["speculative_config"])'
    document = {"speculative_config": config, "per_batch_size": rows}
    return _json("vllm", document, use, cannot, _fixed(rows))


def tensorrt_llm(job: ExportJob) -> Export:
    """`speculative_config` of TensorRT-LLM: the best fixed length of each batch size. By its
    documentation of 1.4.0rc4; not parsed by it. A length of `draft_len_schedule` holds from its
    batch size on."""
    cannot = (
        "TensorRT-LLM drafts one length for the whole batch, and does not stop on low confidence; "
        "written by its documentation of 1.4.0rc4"
    )
    rows, config = _by_batch(job), None
    if longest := max(row["num_speculative_tokens"] for row in rows):
        drafts: dict[str, Any] = {
            "decoding_type": "Draft_Target",
            "speculative_model_dir": job.draft,
        }
        if job.matched is not None:
            drafts = {"decoding_type": "NGram", "max_matching_ngram_size": job.matched[0]}
        schedule = {row["batch"]: row["num_speculative_tokens"] for row in rows}
        config = {**drafts, "max_draft_len": longest, "draft_len_schedule": schedule}
    use = "trtllm-serve TARGET --extra_llm_api_options FILE with this speculative_config"
    document = {"speculative_config": config, "per_batch_size": rows}
    return _json("tensorrt-llm", document, use, cannot, _fixed(rows))


def openvino_genai(job: ExportJob) -> Export:
    """Generation config of OpenVINO GenAI: a fixed length, or a stop on low confidence. Parsed by
    GenAI 2026.4 in a test. The second is for continuous batching alone."""
    cannot = "OpenVINO GenAI (2026.4) has one length or one threshold, alike at every batch size"
    best, controller = _best(job, {"hf-threshold": THRESHOLD})
    config: dict[str, Any] | None = None
    if best.name == "hf-threshold":
        config = {"assistant_confidence_threshold": controller.threshold}
    elif controller.length:
        config = {"num_assistant_tokens": controller.length}
        if job.matched is not None:
            config["max_ngram_size"] = job.matched[0]
    kind = "draft_model(...)" if job.matched is None else "prompt_lookup=True"
    use = f'GenerationConfig(**document["generation_config"]) of a pipeline with {kind}'
    document = {"generation_config": config, "speedup_searched": round(best.after, 4)}
    return _json("openvino-genai", document, use, cannot, (best.best,))


def _by_batch(job: ExportJob) -> list[dict[str, Any]]:
    """The best fixed length of each batch size that was measured."""
    rows = []
    for cell in sorted(job.cells, key=lambda cell: cell.batch):
        result = best_fixed(job.trace, cell)
        length = CONTROLLERS.make(result.best).length
        rows.append(
            {
                "batch": cell.batch,
                "num_speculative_tokens": length,
                "use": "draft" if length else "disable",
                "speedup_searched": round(result.after, 4),
            }
        )
    return rows


def _fixed(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(f"fixed(length={row['num_speculative_tokens']})" for row in rows)


def transformers(job: ExportJob) -> Export:
    """Generation config of the *assistant* of transformers: the best of its three policies. Parsed
    by transformers in a test. Of the model itself where the text is copied from: the best
    length."""
    cannot = (
        "transformers has no cost-aware or moving-average length, drafts at batch size 1 only, and "
        "where scikit-learn is installed moves assistant_confidence_threshold by itself"
    )
    spaces: dict[str, Space] = {
        "hf-heuristic": {"length": Tokens(1, 32)},
        "hf-threshold": THRESHOLD,
    }
    best, controller = _best(job, spaces)
    config: dict[str, Any] | None = None
    if controller.length and job.matched is not None:
        most, _ = job.matched
        config = {"prompt_lookup_num_tokens": controller.length, "max_matching_ngram_size": most}
    elif controller.length:
        config = {
            "num_assistant_tokens": controller.length,
            # Of the two, the one that starts each request afresh, as ours does.
            "num_assistant_tokens_schedule": (
                "heuristic_transient" if best.name == "hf-heuristic" else "constant"
            ),
            # Left out it would be 0.4; 0 never stops.
            "assistant_confidence_threshold": getattr(controller, "threshold", 0.0),
        }
    whose = "assistant_model" if job.matched is None else "model"
    use = f'{whose}.generation_config.update(**document["generation_config"])'
    document = {"generation_config": config, "speedup_searched": round(best.after, 4)}
    return _json("transformers", document, use, cannot, (best.best,))


def llama_cpp(job: ExportJob) -> Export:
    """Flags of `llama-server`: a fixed length, cut where the draft's top probability is low. By its
    server's documentation of commit 00dc805; not parsed by it."""
    cannot = (
        "llama.cpp adapts nothing between rounds and drafts alike at every batch size; it takes "
        "the probability among the draft's ten likeliest tokens, so its threshold is a little "
        "laxer; written by its documentation of commit 00dc805"
    )

    def make(values: Mapping[str, Any]) -> Controller:
        # A window held at one length, and the unsure token left out: what its draft loop does.
        n = values["length"]
        cut = {"threshold": values["threshold"], "keep": False}
        controller: Controller = CONTROLLERS.make(
            Spec("gammatune+", (), {"length": n, "low": n, "high": n, **cut})
        )
        return controller

    fixed = best_fixed(job.trace, job.cell)
    if job.matched is not None:
        return _llama_cpp_file(fixed, cannot, [
            "--spec-type ngram-simple",
            f"--spec-ngram-simple-size-n {job.matched[0]}",
            f"--spec-ngram-simple-size-m {CONTROLLERS.make(fixed.best).length}",
        ])  # fmt: skip
    start = {"length": max(CONTROLLERS.make(fixed.best).length, 1), "threshold": 0.0}
    base = parse(CONTROLLERS.text(make(start)))
    result = _search(job, base, THRESHOLD, make)
    best: Any = CONTROLLERS.make(result.best)
    draft = job.draft if job.draft.endswith(".gguf") else "DRAFT.gguf"
    flags = [
        "--spec-type draft-simple",
        f"--spec-draft-model {draft}",
        f"--spec-draft-n-max {best.length}",
        "--spec-draft-n-min 0",
        f"--spec-draft-p-min {best.threshold:g}",
    ]
    if job.sampled:  # else it drafts greedily, and accepts less
        flags.append("--spec-draft-sampling probabilistic")
    return _llama_cpp_file(result, cannot, flags)


def _llama_cpp_file(result: SearchResult, cannot: str, flags: Sequence[str]) -> Export:
    pays = result.after > 1
    head = [
        f"# use: llama-server -m TARGET.gguf $(grep -v '^#' THIS_FILE)   (speed-up on the "
        f"prompts searched: {max(result.after, 1.0):.2f})",
        "# builds before the flags were renamed: --draft-max, --draft-min, --draft-p-min",
        f"# cannot: {cannot}",
    ]
    lines = [*head, *(flags if pays else ["--spec-type none"])]
    return Export("\n".join(lines) + "\n", cannot, (result.best if pays else "fixed(length=0)",))


def sglang(job: ExportJob) -> Export:
    """`--speculative-adaptive-config` of SGLang: the best moving average of each batch size. By its
    source of 0.5.23; not parsed by it. It starts at `--speculative-num-steps`."""
    cannot = (
        "SGLang adapts the drafts of EAGLE heads alone (topk 1): one length for the whole batch, "
        "by the mean over its requests, kept from request to request; written by its source of "
        "0.5.23"
    )
    names = "ema_alpha", "update_interval", "warmup_batches", "up_hysteresis", "down_hysteresis"
    slots: dict[str, Any] = {}
    specs = []
    for cell in sorted(job.cells, key=lambda cell: cell.batch):
        spaces = {"sglang-ema": SPACES["sglang-ema"]}
        best, made = _best(replace(job, cell=cell), spaces, copies=True)
        moves = best.name == "sglang-ema"
        steps = list(made.steps) if moves else [made.length]
        settings = {name: getattr(made, name) for name in names if moves}
        slots[str(cell.batch)] = {"candidate_steps": steps, **settings}
        specs.append(best.best)
    use = (
        "--speculative-algorithm EAGLE --speculative-draft-model-path HEAD "
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6 "
        "--speculative-adaptive --speculative-adaptive-config THIS_FILE"
    )
    return _json("sglang", slots, use, cannot, tuple(specs))


def exllamav3(job: ExportJob) -> Export:
    """Arguments of exllamav3's `Generator`: a fixed length, or a stop where keeping is unlikely. By
    its source of 1.6.5; not parsed by it."""
    cannot = (
        "exllamav3 has one ceiling for the whole batch, and its bins are of the draft's largest "
        "logit where exllama-confidence has log-odds; written by its source of 1.6.5"
    )
    spaces: dict[str, Space] = {
        "exllama-confidence": {"confidence": Real(0, 1), "high": Tokens(1, 32)}
    }
    best, made = _best(job, spaces)
    arguments: dict[str, Any] | None = None
    if best.name == "exllama-confidence":
        arguments = {
            "num_draft_tokens": made.high,
            "dynamic_draft_tokens": True,
            "draft_confidence": made.confidence,
        }
    elif made.length:
        arguments = {"num_draft_tokens": made.length, "dynamic_draft_tokens": False}
        if job.matched is not None:
            arguments["ngram_match_min"] = job.matched[1]
    use = 'Generator(..., **document["generator"])'
    document = {"generator": arguments, "speedup_searched": round(best.after, 4)}
    return _json("exllamav3", document, use, cannot, (best.best,))


EXPORTS: Mapping[str, Callable[[ExportJob], Export]] = {
    "vllm": vllm,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "tensorrt-llm": tensorrt_llm,
    "openvino-genai": openvino_genai,
    "sglang": sglang,
    "exllamav3": exllamav3,
}


def _best(
    job: ExportJob, spaces: Mapping[str, Space], copies: bool = False
) -> tuple[SearchResult, Any]:
    """The best of all fixed lengths and, for drafts that are not copied from the text unless
    `copies`, of the controllers with a space; with the controller."""
    results = [best_fixed(job.trace, job.cell)]
    if copies or job.matched is None:
        results += [_search(job, parse(name), space) for name, space in spaces.items()]
    best = max(results, key=lambda result: result.after)
    return best, CONTROLLERS.make(best.best)


def _search(
    job: ExportJob,
    spec: Spec,
    space: Space,
    make: Callable[[Mapping[str, Any]], Controller] | None = None,
) -> SearchResult:
    return search(
        spec, job.trace, job.cell, budget=job.budget, seed=job.seed, space=space, make=make
    )


def _json(
    engine: str, document: Mapping[str, Any], use: str, cannot: str, specs: tuple[str, ...]
) -> Export:
    value = {"schema": SCHEMA, "for": engine, **document, "use": use, "cannot": cannot}
    return Export(json.dumps(value, ensure_ascii=False, indent=2) + "\n", cannot, specs)


def write_exports(files: Sequence[tuple[str, str]], job: ExportJob) -> dict[str, dict[str, Any]]:
    """Write the exports, given as `(engine, file)`; per engine, what it does and cannot do."""
    written = {}
    for engine, file in files:
        made = export(engine, job)
        Path(file).write_text(made.text, encoding="utf-8")
        written[engine] = {"file": file, "like": list(made.specs), "cannot": made.cannot}
    return written
