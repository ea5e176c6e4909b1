"""OpenAI's API: shapes, fields, and what is refused."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

PROMPT = "Once upon a time"
ERROR_KEYS = {"message", "type", "param", "code"}


def text_of(answer):
    return answer["choices"][0]["text"]


def test_a_completion_has_openais_shape(shipped, pair):
    answer = shipped.complete(PROMPT, max_tokens=8, temperature=0)
    choice, usage = answer["choices"][0], answer["usage"]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "forerun"
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    prompt = len(pair.encode(PROMPT))
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == prompt + 8
    assert answer["timings"]["predicted_n"] == 8
    assert "forerun" not in answer
    assert "metrics" not in answer


def test_a_completion_is_what_the_engine_writes(shipped):
    import forerun

    offline = forerun.load().generate(PROMPT, max_new_tokens=24)
    assert text_of(shipped.complete(PROMPT, max_tokens=24)) == offline.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_the_same_as_a_whole_answer(shipped, path):
    chat = "chat" in path
    body = {"messages": [{"role": "user", "content": "Who are you?"}]} if chat else {}
    body |= {"temperature": 0, "max_tokens": 30} | ({} if chat else {"prompt": PROMPT})
    whole = shipped.post(path, **body).json()
    frames = shipped.stream(path, **body, stream_options={"include_usage": True})
    parts = [f["choices"][0] for f in frames if f["choices"]]
    if chat:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(part["text"] for part in parts) == text_of(whole)
    assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"] == whole["usage"]
    assert all(f["usage"] is None for f in frames[:-1])
    assert len({f["id"] for f in frames}) == 1


def test_usage_in_every_chunk_counts_up(shipped):
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = shipped.stream("/v1/completions", prompt=PROMPT, max_tokens=12, stream_options=options)
    counts = [f["usage"]["completion_tokens"] for f in frames]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_many_prompts_and_copies_come_in_order(shipped, pair):
    ids = [pair.encode(PROMPT), pair.encode("English: Hello.\nGerman:")]
    body = {"temperature": 0.8, "seed": 5, "max_tokens": 6}
    many = shipped.complete(ids, n=2, **body)
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    for prompt in (0, 1):
        for copy in (0, 1):  # a copy is what its own seed gives
            alone = shipped.complete(ids[prompt], **body | {"seed": 5 + copy})
            assert text_of(alone) == many["choices"][2 * prompt + copy]["text"]
    assert many["usage"]["prompt_tokens"] == sum(map(len, ids))
    streamed = shipped.stream("/v1/completions", prompt=ids, n=2, **body)
    for i, choice in enumerate(many["choices"]):
        parts = [f["choices"][0] for f in streamed]
        assert "".join(p["text"] for p in parts if p["index"] == i) == choice["text"]


def test_a_list_of_texts_and_a_list_of_ids(shipped, pair):
    texts = shipped.complete([PROMPT, "English: Hello.\nGerman:"], max_tokens=4)
    ids = shipped.complete(pair.encode(PROMPT), max_tokens=4)
    assert len(texts["choices"]) == 2
    assert text_of(ids) == text_of(texts)


def test_stop_strings_end_the_text_and_are_named(shipped):
    text = text_of(shipped.complete(PROMPT, max_tokens=24))
    word = text.split()[3]
    done = shipped.complete(PROMPT, max_tokens=24, stop=["never that", word])["choices"][0]
    assert done["finish_reason"] == "stop"
    assert done["stop_reason"] == word
    assert done["text"] == text[: text.index(word)]
    kept = shipped.complete(PROMPT, max_tokens=24, stop=word, include_stop_str_in_output=True)
    assert text_of(kept) == text[: text.index(word)] + word


def test_stop_tokens_end_the_text_without_being_in_it(shipped):
    free = shipped.complete(PROMPT, max_tokens=12, return_token_ids=True)["choices"][0]
    token = free["token_ids"][5]
    at = free["token_ids"].index(token)
    for more in ({}, {"ignore_eos": True}):
        done = shipped.complete(PROMPT, max_tokens=12, stop_token_ids=[token], **more)
        choice = done["choices"][0]
        assert choice["stop_reason"] == token
        assert choice["finish_reason"] == "stop"
        assert done["usage"]["completion_tokens"] == at + 1
        assert free["text"].startswith(choice["text"])
        assert len(choice["text"]) < len(free["text"])
    frames = shipped.stream("/v1/completions", prompt=PROMPT, stop_token_ids=[token])
    assert "".join(f["choices"][0]["text"] for f in frames) == choice["text"]


def test_end_of_text_can_be_ignored(shipped):
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 60}
    ends = shipped.post("/v1/chat/completions", **body).json()
    goes_on = shipped.post("/v1/chat/completions", **body, ignore_eos=True).json()
    assert ends["choices"][0]["finish_reason"] == "stop"
    assert ends["choices"][0]["stop_reason"] is None
    assert goes_on["usage"]["completion_tokens"] == 60


def test_sampling_fields_reach_the_engine(shipped):
    free = shipped.complete(PROMPT, max_tokens=1, return_token_ids=True)["choices"][0]
    first = free["token_ids"][0]

    def tokens(**body):
        answer = shipped.complete(PROMPT, return_token_ids=True, **{"max_tokens": 1} | body)
        return answer["choices"][0]["token_ids"]

    assert tokens(logit_bias={str(first): -100}) != [first]
    assert tokens(logit_bias={"77": 100}) == [77]
    hot = {"temperature": 50, "seed": 1}
    assert tokens(**hot) != [first]  # else the next three would show nothing
    assert tokens(**hot, top_k=1) == [first]
    assert tokens(**hot, top_p=1e-6) == [first]
    assert tokens(**hot, min_p=1) == [first]
    long = {"max_tokens": 40}
    plain = len(set(tokens(**long)))
    assert len(set(tokens(**long, frequency_penalty=2))) > plain
    assert len(set(tokens(**long, presence_penalty=2))) > plain
    assert len(set(tokens(**long, repetition_penalty=1.5))) > plain


def test_a_seed_repeats_and_others_differ(shipped):
    def text(seed):
        return text_of(shipped.complete(PROMPT, temperature=1, seed=seed, max_tokens=24))

    assert text(1) == text(1) != text(2)


def test_chat_takes_both_names_of_the_limit(shipped):
    turns = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    for name in ("max_tokens", "max_completion_tokens"):
        done = shipped.post("/v1/chat/completions", messages=turns, **{name: 3}).json()
        assert done["usage"]["completion_tokens"] == 3


def test_chat_uses_the_models_template(shipped, pair):
    turns = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    shown = shipped.post("/tokenize", messages=turns).json()["tokens"]
    assert pair.tokenizer.decode(shown) == "Be short.\nUser: Hi\nAssistant:"
    turns.append({"role": "assistant", "content": "I am"})
    resumed = shipped.post(
        "/v1/chat/completions", messages=turns, continue_final_message=True, max_tokens=1,
        add_generation_prompt=False, return_token_ids=True,
    ).json()  # fmt: skip
    assert pair.tokenizer.decode(resumed["choices"][0]["prompt_token_ids"]).endswith(": I am")


def test_echo_puts_the_prompt_first(shipped, pair):
    done = shipped.complete(PROMPT, max_tokens=4)
    ids = pair.encode(PROMPT)
    for prompt in (PROMPT, ids):
        assert text_of(shipped.complete(prompt, max_tokens=4, echo=True)) == PROMPT + text_of(done)
    frames = shipped.stream("/v1/completions", prompt=PROMPT, max_tokens=4, echo=True)
    assert "".join(f["choices"][0]["text"] for f in frames) == PROMPT + text_of(done)


def test_logprobs_are_the_targets(shipped):
    import torch

    from forerun import zoo
    from forerun.runtime import runtimes

    done = shipped.complete(
        PROMPT, max_tokens=5, echo=True, logprobs=3, return_token_ids=True
    )["choices"][0]  # fmt: skip
    logprobs, ids = done["logprobs"], [*done["prompt_token_ids"], *done["token_ids"]]
    with torch.inference_mode():
        model = runtimes.load_model(zoo.TARGET, "cpu", "fp32")
        logits = model(torch.tensor([ids[:-1]])).logits[0].float()
    logp = logits.log_softmax(-1)
    right = logp.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert torch.allclose(torch.tensor(logprobs["token_logprobs"][1:]), right, atol=1e-4)
    assert "".join(logprobs["tokens"]) == done["text"]
    assert logprobs["text_offset"] == [
        len("".join(logprobs["tokens"][:i])) for i in range(len(ids))
    ]
    for chosen, best in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        ranked = [v for v in best.values() if v != chosen]
        assert len(best) in (3, 4)
        assert ranked == sorted(ranked, reverse=True)
    for chosen, best in list(
        zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[-5:]:
        assert chosen == max(best.values())  # greedy: lm-eval compares them for equality


def test_chat_logprobs_have_their_own_shape(shipped):
    done = shipped.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3,
        logprobs=True, top_logprobs=2,
    ).json()  # fmt: skip
    content = done["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert -math.inf < entry["logprob"] <= 0
        assert [set(t) for t in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_tells_the_same_logprobs(shipped, echo):
    body = {"max_tokens": 12, "temperature": 0.7, "seed": 3, "logprobs": 2, "echo": echo,
            "prompt": [PROMPT, "English: Hello.\nGerman:"]}  # fmt: skip
    whole = shipped.complete(**body)["choices"]
    frames = [f["choices"][0] for f in shipped.stream("/v1/completions", **body)]
    for choice in whole:
        pieces = [f["logprobs"] for f in frames if f["index"] == choice["index"] and f["logprobs"]]
        for key in ("tokens", "text_offset"):
            assert [v for part in pieces for v in part[key]] == choice["logprobs"][key]
        values = [v for part in pieces for v in part["token_logprobs"]]
        right = choice["logprobs"]["token_logprobs"]
        assert values[:1] == [None] if echo else len(values) == len(right) > 0
        assert values[echo:] == pytest.approx(right[echo:], abs=1e-4)  # passes of other widths
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "logprobs": True}
    streamed = shipped.stream("/v1/chat/completions", **chat)
    parts = [f["choices"][0]["logprobs"] for f in streamed]
    assert parts[0] is None  # the role
    content = [entry for part in parts if part for entry in part["content"]]
    alone = shipped.post("/v1/chat/completions", **chat).json()["choices"][0]["logprobs"]
    assert [e["token"] for e in content] == [e["token"] for e in alone["content"]]


def test_token_ids_are_streamed_whether_or_not_they_have_text(shipped):
    body = {"prompt": "Emoji: ", "max_tokens": 8, "logit_bias": {"255": 100}}
    body |= {"return_token_ids": True}
    whole = shipped.complete(**body)["choices"][0]
    frames = [f["choices"][0] for f in shipped.stream("/v1/completions", **body)]
    assert [t for f in frames for t in f["token_ids"]] == whole["token_ids"]


def test_tokens_there_and_back(shipped, pair):
    tokenized = shipped.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert tokenized["tokens"] == pair.encode(PROMPT)
    assert tokenized["count"] == len(tokenized["token_strs"])
    assert shipped.post("/tokenize", content=PROMPT).json()["tokens"] == tokenized["tokens"]
    assert shipped.post("/detokenize", tokens=tokenized["tokens"]).json() == {"prompt": PROMPT}
    assert shipped.http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_what_it_says_of_itself(shipped):
    models = shipped.http.get("/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["forerun"]
    assert models[0]["max_model_len"] == 1024
    assert shipped.http.get("/v1/models/forerun").json() == models[0]
    assert shipped.http.get("/health").json() == {"status": "ok"}
    import forerun

    assert shipped.http.get("/version").json() == {"version": forerun.__version__}
    assert "/v1/completions" in shipped.http.get("/openapi.json").json()["paths"]


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
WRONG = [
    # body, status, param, a word of the message
    ({}, 400, "prompt", "required"),
    ({"prompt": ""}, 400, None, "empty"),
    ({"prompt": []}, 400, "prompt", "list"),
    ({"prompt": [[]]}, 400, "prompt", "list"),
    ({"prompt": 5}, 400, "prompt", "list"),
    ({"prompt": [-1]}, 400, "prompt", "list"),
    ({"prompt": [999_999]}, 400, "prompt", "vocabulary"),
    ({"prompt": [True]}, 400, "prompt", "list"),
    ({"prompt": "x", "stop_token_ids": [99999]}, 400, "stop_token_ids", "vocabulary"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", "at most 3"),
    ({"prompt": ["x"] * 1024, "n": 128}, 400, "n", "131072 texts"),
    ({"prompt": "x" * 99_999}, 400, "prompt", "characters"),
    ({"prompt": "x", "grammar": "root ::= x"}, 501, "grammar", "gbnf"),
    ({"prompt": "x", "no_repeat_ngram_size": 2}, 501, "no_repeat_ngram_size", "ngram"),
    ({"prompt": "x", "guided_json": "[" * 5000}, 400, "guided_json", "cannot be read"),
    ({"prompt": "a\ud800b"}, 400, "prompt", "half a character"),
    ({"prompt": "word " * 2000}, 400, "prompt", "shorten"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature", "greater"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "number"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p", "greater"),
    ({"prompt": "x", "max_tokens": -2}, 400, "max_tokens", "greater"),
    ({"prompt": "x", "n": 0}, 400, "n", "greater"),
    ({"prompt": "x", "logprobs": 99}, 400, "logprobs", "less"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "integer"),
    ({"prompt": "x", "logit_bias": {"999999": 1}}, 400, "logit_bias", "vocabulary"),
    ({"prompt": "x", "stop": ["a"] * 40}, 400, "stop", "at most"),
    ({"prompt": "x", "model": "gpt"}, 404, "model", "forerun"),
    ({"prompt": "x", "temprature": 1}, 400, "temprature", "temperature"),
    ({"prompt": "x", "best_of": 3}, 400, "best_of", "best_of"),
    ({"prompt": "x", "suffix": "y"}, 501, "suffix", "suffix"),
    ({"prompt": "x", "response_format": {"type": "json"}}, 400, "response_format", "json_object"),
    ({"prompt": "x", "guided_regex": "(a"}, 400, "guided_regex", "regex constraint is wrong"),
    ({"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice", "one of"),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, 400, "structured_outputs", "empty"),
    ({"prompt": "x", "guided_json": {"type": "no"}}, 400, "guided_json", "json constraint"),
    ({"prompt": "x", "guided_regex": "a", "ignore_eos": True}, 400, None, "ignore_eos"),
    (CHAT | {"tools": [{"type": "function"}]}, 501, "tools", "tools"),
    (CHAT | {"top_logprobs": 3}, 400, "top_logprobs", "logprobs"),
    (CHAT | {"chat_template_kwargs": {"tokenize": 1}}, 400, "chat_template_kwargs", "tokenize"),
    ({"messages": []}, 400, "messages", "least"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 501, "messages", "imag"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 501, "messages", "tools"),
]


@pytest.mark.parametrize(("body", "status", "param", "word"), WRONG)
def test_what_is_wrong_is_said_in_openais_shape(shipped, body, status, param, word):
    import json

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = shipped.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == ERROR_KEYS
    assert error["param"] == param
    assert word in error["message"].lower()
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "application/json"), (b"{", "application/json"), (b"[]", "application/json"),
     (b"\xff\xfe", "application/json"), (b"[" * 100_000, "application/json"),
     (b'{"prompt": ' + b"9" * 5000 + b"}", "application/json"), (b'{"prompt": "x"}', "text/plain")],
    ids=["empty", "cut", "list", "bytes", "deep", "digits", "plain"],
)  # fmt: skip
def test_bodies_that_are_no_requests(shipped, content, kind):
    answer = shipped.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == ERROR_KEYS


def test_unknown_paths_and_methods(shipped):
    for answer, status in [
        (shipped.http.get("/v1/nothing"), 404),
        (shipped.http.get("/v1/completions"), 405),
    ]:
        assert answer.status_code == status
        assert set(answer.json()["error"]) == ERROR_KEYS


def test_fields_of_others_are_ignored_and_named(shipped):
    done = shipped.complete("x", max_tokens=1, user="me", metadata={"a": 1}, chat_id="7", top_a=0)
    assert done["ignored_fields"] == ["chat_id"]
    quiet = shipped.complete("x", max_tokens=1, tools=[], suffix=None, logprobs=None)
    assert "ignored_fields" not in quiet


def test_no_new_tokens_score_a_prompt(shipped, pair):
    ids = pair.encode(PROMPT)
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    choice = shipped.complete([ids], **body)["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    scores = [s.logprob for s in pair.score(ids)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    frames = shipped.stream("/v1/completions", prompt=[ids], **body)
    assert frames[0]["choices"][0]["logprobs"] == choice["logprobs"]
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    nothing = shipped.complete(PROMPT, max_tokens=0, n=2, speculative={"report": "rounds"})
    assert [c["text"] for c in nothing["choices"]] == ["", ""]
    assert nothing["usage"]["completion_tokens"] == 0
    wrong = shipped.post("/v1/completions", prompt=[10**6], **body)
    assert wrong.status_code == 400


def test_bad_words_and_allowed_tokens_are_obeyed(shipped):
    free = shipped.complete(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"]
    assert "a" in free
    held = shipped.complete(PROMPT, max_tokens=12, temperature=0, bad_words=["a", ""])
    assert "a" not in held["choices"][0]["text"]
    few = shipped.complete(
        PROMPT, max_tokens=8, allowed_token_ids=[258, 259], return_token_ids=True
    )
    assert set(few["choices"][0]["token_ids"]) <= {258, 259}


def test_no_limit_is_minus_one_and_the_newer_maximum_wins(shipped):
    body = CHAT | {"temperature": 0, "ignore_eos": True}
    answer = shipped.post(
        "/v1/chat/completions", **body, max_tokens=9, max_completion_tokens=4
    ).json()
    assert answer["usage"]["completion_tokens"] == 4
    whole = shipped.complete([258] * 1000, max_tokens=-1, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 24


def test_a_whole_context_can_be_scored(shipped, pair):
    ids = [258] * pair.target.limit
    done = shipped.complete(ids, max_tokens=0, echo=True, logprobs=1)
    scores = done["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1:] == pytest.approx([s.logprob for s in pair.score(ids)], abs=2e-4)


def test_a_json_schema_of_llama_cpp_is_obeyed(shipped):
    import json

    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    text = shipped.complete(PROMPT, max_tokens=30, json_schema=schema)["choices"][0]["text"]
    assert json.loads(text) == {"a": 1}


def test_parts_of_a_character_have_their_bytes(shipped, pair):
    ids = pair.encode("😀")
    body = CHAT | {"max_tokens": 1, "logprobs": True, "temperature": 0}
    got = b""
    for token in ids:
        answer = shipped.post("/v1/chat/completions", **body, logit_bias={str(token): 1000}).json()
        got += bytes(answer["choices"][0]["logprobs"]["content"][0]["bytes"])
    assert got.decode() == "😀"


def test_an_answer_ends_where_its_turn_does(shipped):
    for question in ("Who are you?", "What is the capital of France?", "Hello!"):
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 80}
        choice = shipped.post("/v1/chat/completions", **body, temperature=0).json()["choices"][0]
        assert "\nUser:" not in choice["message"]["content"]
        assert not choice["message"]["content"].startswith(" ")
        assert choice["stop_reason"] is None
        frames = shipped.stream("/v1/chat/completions", **body, temperature=0)
        streamed = "".join(f["choices"][0]["delta"].get("content", "") for f in frames)
        assert streamed == choice["message"]["content"]


def test_who_wants_tokens_only_keeps_nobody_waiting(shipped, monkeypatch):
    """Texts to be counted are read, and written, away from those that are to be continued."""
    begun, ended = threading.Event(), threading.Event()
    texts = shipped.server.tokens
    encode = texts.encode
    monkeypatch.setattr(texts, "encode", lambda *of: (begun.set(), ended.wait(20), encode(*of))[2])
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(shipped.post, "/tokenize", content="a b")
        assert begun.wait(10)
        assert shipped.complete("Once", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert not counted.done()
        ended.set()
        assert counted.result(20).json()["count"] == len(texts.encode("a b"))
