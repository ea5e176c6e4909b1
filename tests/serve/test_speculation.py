"""Speculation per request: what may be asked, and what is told."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun.serve.protocol import CompletionRequest

PROMPT = "Once upon a time"


def test_false_is_plain_decoding(shipped):
    done = shipped.complete(PROMPT, max_tokens=12, speculative=False)
    assert done["timings"]["draft_n"] == 0
    plain = shipped.complete(
        PROMPT, max_tokens=12, speculative={"controller": "fixed(0)", "report": "summary"}
    )
    assert plain["forerun"]["origins"] == {"plain": 12}
    drafted = shipped.complete(PROMPT, max_tokens=12, speculative={"controller": "fixed(3)"})
    assert drafted["timings"]["draft_n"] > 0
    for answer in (plain, drafted):
        assert answer["choices"][0]["text"] == done["choices"][0]["text"]


@pytest.mark.parametrize(
    "body",
    [
        {"speculative": {"controller": "fixed(2)", "rule": "exact", "report": "summary"}},
        {"vllm_xargs": {"forerun_controller": "fixed(2)", "forerun_rule": "exact",
                        "forerun_report": "summary", "other": 1}},
    ],
    ids=["nested", "flat"],
)  # fmt: skip
def test_controller_and_rule_in_both_spellings(shipped, body):
    report = shipped.complete(PROMPT, max_tokens=12, temperature=0, **body)["forerun"]
    assert (report["controller"], report["rule"], report["lossless"]) == (
        "fixed(length=2)",
        "exact",
        True,
    )
    assert report["drafted"] <= 2 * report["rounds"]


@pytest.mark.parametrize(
    ("asked", "status", "word"),
    [
        ({"controller": "gamatune"}, 400, "did you mean 'gammatune'"),
        ({"controller": "gammatune(eta=)"}, 400, "expected a name"),
        ({"controller": "fixed(1" + "1" * 500 + ")"}, 400, "400 characters"),
        ({"controllr": "fixed"}, 400, "extra"),
        ({"report": "all"}, 400, "summary"),
        ("yes", 400, "speculative"),
        ({"rule": "typical"}, 403, "--allow-rule typical"),
        ({"rule": "budget(typical)"}, 403, "--allow-rule typical"),
        ({"rule": "exact"}, 400, "temperature 0"),
    ],
)
def test_what_cannot_be_asked(shipped, asked, status, word):
    answer = shipped.post("/v1/completions", prompt=PROMPT, temperature=1, speculative=asked)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_both_spellings_at_once_are_refused(shipped):
    xargs = {"forerun_controller": "fixed"}
    for body in ({"speculative": True, "vllm_xargs": xargs}, {"vllm_xargs": {"forerun_rule": 1}}):
        answer = shipped.post("/v1/completions", prompt=PROMPT, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "vllm_xargs"


def test_an_allowed_lossy_rule_reports_its_drift(shipped):
    asked = {"controller": "fixed(4)", "report": "rounds"}
    for rule in ("ears(beta=0.5)", "budget(ears(beta=0.5), drift=0.5)"):
        done = shipped.complete(
            PROMPT, max_tokens=30, temperature=1, seed=1, speculative=asked | {"rule": rule}
        )
        report = done["forerun"]
        assert report["lossless"] is False
        assert 0 <= report["drift_mean"] <= report["drift_max"] <= 1
        drifts = [d for r in done["choices"][0]["forerun"]["rounds"] for d in r["drift"]]
        assert report["drift_mean"] == pytest.approx(sum(drifts) / 30, abs=1e-5)
    exact = shipped.complete(PROMPT, max_tokens=4, speculative={"report": "summary"})
    assert exact["forerun"]["drift_mean"] is None


def test_the_three_reports_agree(shipped):
    asked = {"controller": "fixed(3)", "report": "rounds"}
    done = shipped.complete(PROMPT, max_tokens=20, speculative=asked)
    rounds = done["choices"][0]["forerun"]["rounds"]
    report, timings = done["forerun"], done["timings"]
    vllm = done["metrics"]["speculative_decoding"]
    drafting = [r for r in rounds if r["drafted"]]
    drafted, accepted = (sum(r[key] for r in rounds) for key in ("drafted", "accepted"))
    assert drafted == report["drafted"] == timings["draft_n"] == vllm["num_draft_tokens"]
    assert accepted == report["accepted"] == timings["draft_n_accepted"]
    assert accepted == vllm["num_accepted_draft_tokens"]
    assert len(drafting) == vllm["num_spec_steps"] == timings["draft_n_verif_steps"]
    assert vllm["per_step_drafted"] == [r["drafted"] for r in drafting]
    assert vllm["per_step_accepted"] == [r["accepted"] for r in drafting]
    assert sum(vllm["acceptance_histogram"]) == len(drafting)
    assert vllm["mean_acceptance_length"] == pytest.approx(1 + accepted / len(drafting))
    # Each shape by its own definition: accepted over drafted, accepted over judged.
    judged = sum(min(r["accepted"] + 1, r["drafted"]) for r in rounds)
    assert vllm["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    assert report["acceptance_rate"] == pytest.approx(accepted / judged, abs=1e-6)
    assert sum(report["origins"].values()) == done["usage"]["completion_tokens"] == 20
    assert sum(report["stopped_by"].values()) == report["rounds"] == len(rounds)


def test_a_stream_of_rounds_adds_up_to_the_whole(shipped, pair):
    body = {
        "prompt": PROMPT, "max_tokens": 20, "temperature": 0.5, "seed": 3,
        "speculative": {"controller": "fixed(3)", "rule": "standard", "report": "rounds"},
    }  # fmt: skip
    whole = shipped.complete(**body)["choices"][0]["forerun"]
    frames = shipped.stream("/v1/completions", **body)
    reports = [f["choices"][0]["forerun"] for f in frames]
    for key in ("tokens", "texts", "origins"):
        assert [v for r in reports for v in r[key]] == whole[key]
    rounds = [v for r in reports for v in r["rounds"]]
    assert len(rounds) == len(frames) == len(whole["rounds"])
    assert [r["proposed"] for r in rounds] == [r["proposed"] for r in whole["rounds"]]
    done = 0
    for r in rounds:  # accepted proposals are what was written
        assert len(r["proposed"]) == len(r["proposed_texts"]) == r["drafted"]
        assert r["proposed"][: r["accepted"]] == whole["tokens"][done : done + r["accepted"]]
        done += r["committed"]
    assert "".join(whole["texts"]) == "".join(f["choices"][0]["text"] for f in frames)
    assert set(frames[-1]) >= {"timings", "metrics", "forerun"}
    assert not any("timings" in f for f in frames[:-1])


def told_of_prediction(done):
    details = done["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    "controller", ["fixed(0)", pytest.param("fixed(2)", marks=pytest.mark.slow), "auto"]
)
def test_a_prediction_is_drafted_and_changes_no_text(shipped, controller):
    # Not a text that runs in circles: what is said twice may be taken up in the wrong place.
    asked = "User: Tell me about Denmark, China and Cuba.\nAssistant:"
    body = {"prompt": asked, "max_tokens": 60, "temperature": 0}
    body["speculative"] = {"controller": controller, "report": "summary"}
    free = shipped.complete(**body)
    text = free["choices"][0]["text"]
    assert "completion_tokens_details" not in free["usage"]
    right = shipped.complete(**body, prediction={"type": "content", "content": text})
    accepted, rejected = told_of_prediction(right)
    assert accepted > 40
    assert rejected == 0
    assert right["forerun"]["rounds"] < 12
    middle = len(text) // 2
    edited = text[:middle] + " Suddenly," + text[middle:]
    parts = [{"type": "text", "text": edited}]
    near = shipped.complete(**body, prediction={"type": "content", "content": parts})
    accepted, rejected = told_of_prediction(near)
    assert accepted > 20
    assert rejected > 0
    wrong = shipped.complete(**body, prediction={"type": "content", "content": "No. Never!"})
    assert told_of_prediction(wrong)[0] <= 1
    long = {"type": "content", "content": "No. Never! " * 20_000}
    assert shipped.post("/v1/completions", **body, prediction=long).status_code == 400
    fits = CompletionRequest(**{**body, "prediction": {"content": " No" * 2000}})
    planner = shipped.server.planner
    assert len(planner.completion(fits, None).jobs[0].prediction) == planner.limit
    for done in (right, near, wrong):
        assert done["choices"][0]["text"] == text


def test_predictions_beside_sampled_neighbours(shipped):
    """Rows of one batch draft from different sources; each gets what it gets alone."""
    body = {"max_tokens": 24, "seed": 4, "speculative": {"controller": "fixed(2)"}}
    alone = shipped.complete(PROMPT, temperature=0.8, **body)["choices"][0]["text"]
    greedy = shipped.complete(PROMPT, temperature=0, **body)["choices"][0]["text"]
    prediction = {"type": "content", "content": greedy}
    requests = [
        {"temperature": 0, "prediction": prediction}, {"temperature": 0.8},
        {"temperature": 0.8, "prediction": prediction}, {"temperature": 0},
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda r: shipped.complete(PROMPT, **body, **r), requests)
        texts = [done["choices"][0]["text"] for done in made]
    assert [texts[0], texts[1], texts[3]] == [greedy, alone, greedy]
    again = shipped.complete(PROMPT, **body, **requests[2])["choices"][0]["text"]
    assert texts[2] == again


def test_a_prediction_changes_no_distribution():
    import torch

    from forerun.controllers import CONTROLLERS
    from forerun.drafters.model import ModelDrafter
    from forerun.engine import Engine, Request, Sampling
    from forerun.rules import RULES
    from forerun.testing import ScriptedModel

    table = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    model = ScriptedModel(table.log())
    engine = Engine(model, ModelDrafter(ScriptedModel(table.flip(1).log()), 3), max_rows=64)
    count, length, rule = 2400, CONTROLLERS.make("fixed(2)"), RULES.make("standard")
    for seed in range(count):
        how = Sampling(temperature=1.0, seed=seed, max_new_tokens=3)
        prediction = [0, 1, 0] if seed % 2 else ()
        engine.submit(Request([0], how, length, rule, prediction=prediction))
    seen = torch.zeros(2, 3, 3, 3)
    for event in engine.run():
        if (done := event.completion) is not None:
            assert any("predicted" in r.counters for r in done.rounds) <= event.request % 2
            seen[event.request % 2][tuple(done.tokens)] += 1
    right = table[0, :, None, None] * table[:, :, None] * table[None]
    for counts in seen:
        share = counts / counts.sum()
        assert float((share - right).abs().sum()) / 2 < 0.065  # 1200 draws of 27 outcomes: 0.045


def test_what_a_request_may_name_is_listed(shipped):
    parts = shipped.http.get("/forerun/parts").json()
    rules = {r["name"]: r for r in parts["rules"]}
    assert rules["ears"]["allowed"]
    assert not rules["ears"]["lossless"]
    assert rules["standard"]["allowed"]
    assert not rules["typical"]["allowed"]
    assert "auto" in {c["name"] for c in parts["controllers"]}
    assert parts["chat"] is True


def test_the_metrics_count_what_was_told(shipped):
    names = ["generation_tokens_total", "spec_decode_num_draft_tokens_total",
             "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total",
             "prompt_tokens_total", "e2e_request_latency_seconds_count"]  # fmt: skip
    before = {name: shipped.metric(name) for name in names}
    done = shipped.complete(
        PROMPT, max_tokens=20, speculative={"controller": "fixed(3)", "report": "summary"}
    )
    grown = [shipped.metric(name) - before[name] for name in names]
    report = done["forerun"]
    vllm = done["metrics"]["speculative_decoding"]
    prompt = done["usage"]["prompt_tokens"]
    assert grown == [20, report["drafted"], report["accepted"], vllm["num_spec_steps"], prompt, 1]
    total = shipped.metric("generation_tokens_total")
    assert shipped.metric("tokens_by_origin_total") == total
    positions = shipped.metric("spec_decode_num_accepted_tokens_per_pos_total")
    assert positions == shipped.metric("spec_decode_num_accepted_tokens_total")
    assert shipped.metric("num_requests_running") == 0


def test_the_dashboard_asks_for_metrics_that_are_there(shipped):
    import json
    import re
    from pathlib import Path

    board = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    asked = " ".join(t["expr"] for panel in board["panels"] for t in panel["targets"])
    metrics = shipped.http.get("/metrics").text
    for name in set(re.findall(r"forerun:\w+", asked)):
        assert re.search(rf"^{name}[{{ ]", metrics, re.MULTILINE), name
    for label in re.findall(r"by \((?!le\b)(\w+)\)", asked):
        assert f'{label}="' in metrics


def test_a_prompt_that_was_read_is_not_read_again(shipped):
    story = "Once upon a time a fox met a bear who sold honey in the big market. " * 4
    body = {"temperature": 0.7, "seed": 2, "max_tokens": 10}
    before = shipped.metric("prefix_cache_hits_total")
    cold, warm = (shipped.complete(story + "The", **body) for _ in range(2))
    prompt = cold["usage"]["prompt_tokens"]
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
    assert (warm["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (prompt - 1, 1)
    assert shipped.metric("prefix_cache_hits_total") == before + prompt - 1


def test_copies_read_their_prompt_once(shipped):
    story = "There was a tall tree and in it lived an owl who was very wise and old. " * 4
    body = {"temperature": 0.9, "seed": 7, "max_tokens": 8, "logprobs": 1}
    before = shipped.metric("prefix_cache_hits_total")
    many = shipped.complete(story, n=3, **body)
    prompt = many["usage"]["prompt_tokens"]
    assert many["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the first read it
    assert shipped.metric("prefix_cache_hits_total") == before + 2 * (prompt - 1)
    for i in range(3):
        alone = shipped.complete(story, **body | {"seed": 7 + i})
        assert many["choices"][i]["text"] == alone["choices"][0]["text"]


COLOUR = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "how",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "c", "schema": COLOUR},
            }
        },
        {"structured_outputs": {"json": COLOUR}},
        {"guided_json": json.dumps(COLOUR)},
    ],
    ids=["openai", "vllm", "flat"],
)
def test_json_of_a_schema(shipped, how):
    pytest.importorskip("llguidance")
    body = {"max_tokens": 40, "temperature": 0.8, "seed": 1, "prompt": "A ball:", **how}
    done = shipped.complete(**body, speculative={"report": "rounds"})
    made = json.loads(done["choices"][0]["text"])
    assert made.keys() == COLOUR["properties"].keys()
    assert made["colour"] in ("red", "green")
    assert isinstance(made["size"], int)
    assert done["forerun"]["origins"]["grammar"] >= 5
    assert done["choices"][0]["finish_reason"] == "stop"
    frames = shipped.stream("/v1/completions", **body)
    assert "".join(f["choices"][0]["text"] for f in frames) == done["choices"][0]["text"]
    plain = shipped.complete(**body, speculative=False)
    assert json.loads(plain["choices"][0]["text"]).keys() == made.keys()


def test_other_structures(shipped):
    pytest.importorskip("llguidance")
    ways = {
        "guided_choice": (["yes", "no"], "yes|no"),
        "guided_regex": ("[0-9]{3}-[a-f]{2}", "[0-9]{3}-[a-f]{2}"),
        "guided_grammar": ('start: "<" /[a-z]{1,4}/ ">"', "<[a-z]{1,4}>"),
    }
    for field, (value, pattern) in ways.items():
        text = shipped.complete("Say:", temperature=1.0, **{field: value})["choices"][0]["text"]
        assert re.fullmatch(pattern, text)
    body = {"messages": [{"role": "user", "content": "JSON"}], "max_tokens": 12}
    done = shipped.post("/v1/chat/completions", **body, response_format={"type": "json_object"})
    assert done.json()["choices"][0]["message"]["content"].startswith("{")


def test_a_structure_shorter_than_asked_for_is_the_clients_error(shipped):
    pytest.importorskip("llguidance")
    body = {"prompt": "Say:", "guided_choice": ["yes"], "min_tokens": 9, "max_tokens": 12}
    done = shipped.post("/v1/completions", **body)
    assert done.status_code == 400
    assert "and the constraint leave no token to choose" in done.json()["error"]["message"]
