"""The page, in a real browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from serve.conftest import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def test_the_page_may_load_nothing_but_itself(shipped):
    answer = shipped.http.get("/")
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert len(answer.content) < 35_000
    assert "http://www.w3.org/2000/svg" in answer.text.replace("https://", "http://")
    assert answer.text.count("http") == answer.text.count("http://www.w3.org/2000/svg") + (
        answer.text.count("http-equiv")
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, shipped) -> Iterator[Any]:
    """A page at the width of a phone, that fails on errors and on requests to anyone else."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    opened, problems = context.new_page(), []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda m: (
            problems.append(m.text) if m.type == "error" and "status of 400" not in m.text else None
        ),
    )
    opened.on(
        "request", lambda r: problems.append(r.url) if not r.url.startswith(shipped.url) else None
    )
    opened.goto(shipped.url)
    opened.wait_for_selector("#rule option:nth-child(2)", state="attached")
    yield opened
    context.close()
    assert problems == [] or problems == ["data:,"]


def write(page, text="Once upon a time", **fields):
    page.get_by_role("tab", name="Completion").click()
    page.fill("#prompt", text)
    for name, value in fields.items():
        if name == "rule":
            page.select_option("#rule", value)
        else:
            page.fill(f"#{name}", str(value))
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(".actions button")


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_colours_and_rounds_are_those_of_the_api(page, shipped):
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    asked = {"controller": "fixed(3)", "report": "rounds"}
    frames = shipped.stream("/v1/completions", **body, speculative=asked)
    report = {key: [v for f in frames for v in f["choices"][0]["forerun"][key]]
              for key in ("texts", "origins", "rounds")}  # fmt: skip
    write(page, tokens=24, controller="fixed(3)")
    spans = page.eval_on_selector_all(
        "article .text .t", "all => all.map(s => [s.textContent, s.className.split(' ')[1]])"
    )
    assert spans == [list(pair) for pair in zip(report["texts"], report["origins"], strict=True)]
    bars = page.eval_on_selector_all(".round", "all => all.map(b => b.title)")
    assert len(bars) == len(report["rounds"])
    for bar, r in zip(bars, report["rounds"], strict=True):
        drafted = f"drafted {r['drafted']}, kept {r['accepted']}"
        assert (
            drafted if r["drafted"] else "nothing drafted (the first token comes at once)"
        ) in bar
    assert "24 tokens" in page.inner_text(".numbers")
    assert fits(page)


def test_a_rejected_proposal_shows_on_hover_and_by_keyboard(page):
    write(page, tokens=24, controller="fixed(3)")
    correction = page.locator("article .correction").first
    correction.hover()
    assert page.locator(".detail del").count() >= 1
    page.focus("article .text")
    page.keyboard.press("Home")
    first = page.inner_text(".detail")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail") != first
    assert page.locator(".t.on").count() == 1


def test_a_race_says_identical(page):
    write(page, tokens=16)
    page.get_by_role("button", name="Race").click()
    page.wait_for_selector(".verdict")
    assert "Identical: yes" in page.inner_text(".verdict")
    lanes = page.eval_on_selector_all(".lane .text", "all => all.map(t => t.textContent)")
    assert len(lanes) == 2
    assert lanes[0] == lanes[1] == page.evaluate("document.querySelector('.text').textContent")
    assert fits(page)


def test_a_lossy_rule_draws_its_drift(page):
    write(page, tokens=24, rule="ears", temperature=1, seed=1)
    assert "Drift, mean so far" in page.inner_text(".drift")
    assert page.locator(".drift polyline").count() == 1


def test_a_chat_remembers_its_turns(page):
    sent = []
    page.on("request", lambda r: sent.append(r.post_data_json) if "chat" in r.url else None)
    for text in ("Who are you?", "Name a fruit."):
        page.fill("#prompt", text)
        page.keyboard.press("Enter")
        page.wait_for_selector("#send:enabled")
        page.wait_for_selector("article:first-child .actions button")
    assert [m["role"] for m in sent[-1]["messages"]] == ["user", "assistant", "user"]


def test_escape_stops_and_errors_are_shown(page, shipped):
    page.get_by_role("tab", name="Completion").click()
    page.fill("#tokens", "900")
    page.fill("#temperature", "1")
    page.fill("#prompt", "Once upon a time")
    page.keyboard.press("Enter")
    page.wait_for_selector("article .t")
    page.keyboard.press("Escape")
    page.wait_for_selector(".actions button")
    assert page.inner_text("#status").startswith("stopped")
    page.fill("#controller", "gamatune")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not(:empty)")
    assert "did you mean 'gammatune'" in page.inner_text("#error")


def test_it_asks_for_a_key_where_one_is_needed(browser, pair):
    with running(pair, api_keys=("secret",)) as locked:
        page = browser.new_page()
        page.goto(locked.url)
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#rule option:nth-child(2)", state="attached")
        assert page.inner_text("#about").startswith("forerun")
        page.close()


def test_it_reads_in_the_dark(browser, shipped):
    context = browser.new_context(color_scheme="dark")
    dark = context.new_page()
    dark.goto(shipped.url)
    colours = dark.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    context.close()
    assert colours == ["rgb(230, 237, 243)", "rgb(13, 17, 23)"]
