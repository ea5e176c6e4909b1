"""Tuned settings as other engines configure them, as far as they can express them.

Each export searches what the other engine can do, by replaying the controller of ours that does the
same, so it need not be the controller recommended for forerun.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from forerun import zoo
from forerun.controllers import CONTROLLERS
from forerun.errors import UnknownNameError
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.spaces import SPACES, Real, Space, Tokens
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import SearchResult, best_fixed, search
from forerun.registry import Spec, parse

SCHEMA = 1
THRESHOLD: Space = {"length": Tokens(1, 32), "threshold": Real(0, 1)}
"""Of a fixed length that stops where the draft is unsure."""
Configured = tuple[Mapping[str, Any] | list[str], str, tuple[str, ...]]
"""What a file holds, by name or line by line; how it is used; and `Export.specs`."""


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

    def search(self, spec: Spec, space: Space, make: Any = None) -> SearchResult:
        """As `tune.search` on these inputs."""
        how: dict[str, Any] = {"budget": self.budget, "seed": self.seed}
        return search(spec, self.trace, self.cell, space=space, make=make, **how)

    @property
    def by_batch(self) -> list[Cell]:
        return sorted(self.cells, key=lambda cell: cell.batch)

    @property
    def sampled(self) -> bool:
        sampling = self.trace.about.get("sampling")
        return isinstance(sampling, Mapping) and bool(sampling.get("temperature"))


def export(engine: str, job: ExportJob) -> Export:
    """The file for an engine; `UnknownNameError` if there is no such export."""
    if engine not in EXPORTS:
        raise UnknownNameError.among("export", engine, EXPORTS)
    make, cannot = EXPORTS[engine]
    content, use, specs = make(job)
    if isinstance(content, list):
        text = "\n".join([f"# use: {use}", f"# cannot: {cannot}", *content])
    else:
        document = {"schema": SCHEMA, "for": engine, **content, "use": use, "cannot": cannot}
        text = json.dumps(document, ensure_ascii=False, indent=2)
    return Export(text + "\n", cannot, specs)


def vllm(job: ExportJob) -> Configured:
    """`num_speculative_tokens_per_batch_size` has inclusive ranges; the first starts at 1 and vLLM
    carries the last on. Parsed by vLLM 0.32 in a test, but for `suffix`, which there needs the
    package arctic-inference."""

    def configured(rows: Sequence[Mapping[str, Any]], longest: int) -> dict[str, Any]:
        ranges, first = list[list[int]](), 1
        for length, alike in groupby(rows, lambda row: row["num_speculative_tokens"]):
            # Between two sizes that were measured the shorter draft is the safer.
            ranges.append([first, max(row["batch"] for row in alike), length])
            first = ranges[-1][1] + 1
        config: dict[str, Any] = {"method": "draft_model", "model": job.draft}
        if job.matched is not None:
            most, least = job.matched
            config = {"method": "ngram", "prompt_lookup_max": most, "prompt_lookup_min": least}
            if str(job.trace.about["drafter"]).startswith("suffix"):
                config = {"method": "suffix", "suffix_decoding_max_tree_depth": most + longest}
        config["num_speculative_tokens"] = longest
        if job.sampled and job.matched is None:  # else it drafts greedily, and accepts less
            config["draft_sample_method"] = "probabilistic"
        if len(ranges) > 1:
            config["num_speculative_tokens_per_batch_size"] = ranges
        return config

    return _by_batch(job, configured, 'LLM(..., speculative_config=document["speculative_config"])')


def tensorrt_llm(job: ExportJob) -> Configured:
    """A length of `draft_len_schedule` holds from its batch size on."""

    def configured(rows: Sequence[Mapping[str, Any]], longest: int) -> dict[str, Any]:
        drafts: dict[str, Any] = {
            "decoding_type": "Draft_Target",
            "speculative_model_dir": job.draft,
        }
        if job.matched is not None:
            drafts = {"decoding_type": "NGram", "max_matching_ngram_size": job.matched[0]}
        schedule = {row["batch"]: row["num_speculative_tokens"] for row in rows}
        return {**drafts, "max_draft_len": longest, "draft_len_schedule": schedule}

    return _by_batch(
        job, configured,
        "trtllm-serve TARGET --extra_llm_api_options FILE with this speculative_config",
    )  # fmt: skip


def _by_batch(
    job: ExportJob, configured: Callable[[list[dict[str, Any]], int], dict[str, Any]], use: str
) -> Configured:
    """The best fixed length of each batch size that was measured, and `speculative_config` made of
    these and the longest; None if that is 0."""
    rows, results = [], [best_fixed(job.trace, cell) for cell in job.by_batch]
    for cell, result in zip(job.by_batch, results, strict=True):
        length = CONTROLLERS.make(result.best).length
        rows.append({
            "batch": cell.batch,
            "num_speculative_tokens": length,
            "use": "draft" if length else "disable",
            "speedup_searched": round(result.after, 4),
        })  # fmt: skip
    longest = max(row["num_speculative_tokens"] for row in rows)
    config = configured(rows, longest) if longest else None
    specs = tuple(result.best for result in results)
    return {"speculative_config": config, "per_batch_size": rows}, use, specs


def openvino_genai(job: ExportJob) -> Configured:
    """A fixed length, or a stop on low confidence, for continuous batching alone. Parsed by GenAI
    2026.4 in a test."""
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
    return _alike("generation_config", config, best, use)


def transformers(job: ExportJob) -> Configured:
    """Of the *assistant*, the best of its three policies; of the model itself where the text is
    copied from, the best length. Parsed by transformers in a test."""
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
    return _alike("generation_config", config, best, use)


def exllamav3(job: ExportJob) -> Configured:
    """Arguments of its `Generator`: a fixed length, or a stop where keeping is unlikely."""
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
    return _alike("generator", arguments, best, 'Generator(..., **document["generator"])')


def _alike(name: str, config: Mapping[str, Any] | None, best: SearchResult, use: str) -> Configured:
    """One configuration for every batch size."""
    return {name: config, "speedup_searched": round(best.after, 4)}, use, (best.best,)


def llama_cpp(job: ExportJob) -> Configured:
    """A fixed length, cut where the draft's top probability is low: flags of `llama-server`."""

    def make(values: Mapping[str, Any]) -> Any:
        # A window held at one length, and the unsure token left out: what its draft loop does.
        held = dict.fromkeys(("length", "low", "high"), values["length"])
        return CONTROLLERS.make(
            Spec("gammatune+", (), {**held, "threshold": values["threshold"], "keep": False})
        )

    result = best_fixed(job.trace, job.cell)
    length = CONTROLLERS.make(result.best).length
    if job.matched is not None:
        flags = [
            "--spec-type ngram-simple",
            f"--spec-ngram-simple-size-n {job.matched[0]}",
            f"--spec-ngram-simple-size-m {length}",
        ]
    else:
        base = make({"length": max(length, 1), "threshold": 0.0})
        result = job.search(parse(CONTROLLERS.text(base)), THRESHOLD, make)
        best: Any = CONTROLLERS.make(result.best)
        flags = [
            "--spec-type draft-simple",
            f"--spec-draft-model {job.draft if job.draft.endswith('.gguf') else 'DRAFT.gguf'}",
            f"--spec-draft-n-max {best.length}",
            "--spec-draft-n-min 0",
            f"--spec-draft-p-min {best.threshold:g}",
        ]
        if job.sampled:  # else it drafts greedily, and accepts less
            flags.append("--spec-draft-sampling probabilistic")
    use = (
        f"llama-server -m TARGET.gguf $(grep -v '^#' THIS_FILE)   (speed-up on the prompts "
        f"searched: {max(result.after, 1.0):.2f}); builds before the flags were renamed: "
        "--draft-max, --draft-min, --draft-p-min"
    )
    if result.after > 1:
        return flags, use, (result.best,)
    return ["--spec-type none"], use, ("fixed(length=0)",)


def sglang(job: ExportJob) -> Configured:
    """`--speculative-adaptive-config`: the best moving average of each batch size. It starts at
    `--speculative-num-steps`."""
    names = "ema_alpha", "update_interval", "warmup_batches", "up_hysteresis", "down_hysteresis"
    slots: dict[str, Any] = {}
    specs = []
    for cell in job.by_batch:
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
    return slots, use, tuple(specs)


EXPORTS: Mapping[str, tuple[Callable[[ExportJob], Configured], str]] = {
    "vllm": (
        vllm,
        "vLLM drafts one length for the whole batch: no length per request, no stop on low "
        "confidence; lengths per batch size it has tested with EAGLE and DFlash drafts only, and "
        "older versions do not know them: there take num_speculative_tokens of your batch size",
    ),
    "transformers": (
        transformers,
        "transformers has no cost-aware or moving-average length, drafts at batch size 1 only, and "
        "where scikit-learn is installed moves assistant_confidence_threshold by itself",
    ),
    "llama.cpp": (
        llama_cpp,
        "llama.cpp adapts nothing between rounds and drafts alike at every batch size; it takes "
        "the probability among the draft's ten likeliest tokens, so its threshold is a little "
        "laxer; written by its server's documentation of commit 00dc805, not parsed by it",
    ),
    "tensorrt-llm": (
        tensorrt_llm,
        "TensorRT-LLM drafts one length for the whole batch, and does not stop on low confidence; "
        "written by its documentation of 1.4.0rc4, not parsed by it",
    ),
    "openvino-genai": (
        openvino_genai,
        "OpenVINO GenAI (2026.4) has one length or one threshold, alike at every batch size",
    ),
    "sglang": (
        sglang,
        "SGLang adapts the drafts of EAGLE heads alone (topk 1): one length for the whole batch, "
        "by the mean over its requests, kept from request to request; written by its source of "
        "0.5.23, not parsed by it",
    ),
    "exllamav3": (
        exllamav3,
        "exllamav3 has one ceiling for the whole batch, and its bins are of the draft's largest "
        "logit where exllama-confidence has log-odds; written by its source of 1.6.5, not parsed "
        "by it",
    ),
}
"""By engine what makes its configuration, and what that cannot express."""


def _best(
    job: ExportJob, spaces: Mapping[str, Space], copies: bool = False
) -> tuple[SearchResult, Any]:
    """The best of all fixed lengths and, for drafts that are not copied from the text unless
    `copies`, of the controllers with a space; with the controller."""
    results = [best_fixed(job.trace, job.cell)]
    if copies or job.matched is None:
        results += [job.search(parse(name), space) for name, space in spaces.items()]
    best = max(results, key=lambda result: result.after)
    return best, CONTROLLERS.make(best.best)
