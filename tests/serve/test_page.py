"""The page, in a real browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from marks import spread
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
    context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
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
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#prompt", text)
    for name, value in fields.items():
        if name == "rule":
            page.select_option("#rule", value)
        else:
            page.fill(f"#{name}", str(value))
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(".actions button")


def chat(page, text):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(f".prompt:text-is('{text}') ~ .actions button:has-text('Race')")


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
    bars = page.eval_on_selector_all(".round", "all => all.map(b => b.ariaLabel)")
    assert len(bars) == len(report["rounds"])
    for i, (bar, r) in enumerate(zip(bars, report["rounds"], strict=True)):
        drafted = f"drafted {r['drafted']}, kept {r['accepted']}; stopped: "
        nothing = "nothing drafted (" + ("" if i else "the first token comes at once")
        assert (drafted if r["drafted"] else nothing) in bar
    passes, kept = len(bars), sum(r["accepted"] for r in report["rounds"])
    said = page.inner_text(".saved")
    assert f"24 tokens in {passes} passes of the model: {24 - passes} of 24 passes saved" in said
    assert f"{kept} of {sum(r['drafted'] for r in report['rounds'])} guesses kept" in said
    assert fits(page)


def test_colours_show_on_hover_on_focus_and_by_the_switch(page):
    write(page, tokens=12, controller="fixed(3)")
    colour = "getComputedStyle(document.querySelector('article .draft')).backgroundColor"
    none, away = "rgba(0, 0, 0, 0)", page.locator("h1")
    away.hover()
    assert page.evaluate(colour) == none
    page.locator("article .text").hover()
    assert page.evaluate(colour) != none
    away.hover()
    page.focus("article .text")
    assert page.evaluate(colour) != none
    page.get_by_role("switch").focus()
    assert page.evaluate(colour) == none
    page.keyboard.press("Space")
    assert page.evaluate(colour) != none


def test_a_rejected_proposal_shows_on_hover_and_by_keyboard(page):
    write(page, tokens=24, controller="fixed(3)")
    correction = page.locator("article .correction").first
    correction.hover()
    assert page.locator(".detail del").count() >= 1
    page.locator("h1").hover()
    assert not page.is_visible(".detail")
    page.focus("article .text")
    page.keyboard.press("Home")
    first = page.inner_text(".detail")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail") not in ("", first)
    assert page.locator(".t.on").count() == 1
    page.keyboard.press("Escape")
    assert not page.is_visible(".detail")
    page.get_by_text("Rounds", exact=True).click()
    page.focus(".round")
    page.keyboard.press("ArrowRight")
    assert "Round 2" in page.inner_text(".detail")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("round 2")


WATCH = """() => {
  window.seen = [];
  const lanes = document.getElementsByClassName("lane");
  const lengths = () => [...lanes].map(lane => lane.lastChild.textContent.length);
  new MutationObserver(() => lengths().length && seen.push(lengths()))
    .observe(document.getElementById("answers"), { subtree: true, childList: true });
}"""


def test_a_race_grows_from_the_start_and_says_identical(browser, shipped):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(shipped.url)
    page.wait_for_selector("#rule option:nth-child(2)", state="attached")
    write(page, tokens=16, controller="fixed(3)")
    page.evaluate(WATCH)
    page.get_by_role("button", name="Race").click()
    page.wait_for_selector(".verdict")
    assert "Identical: yes" in page.inner_text(".verdict")
    assert "slower than it was" in page.inner_text(".verdict")
    seen, texts = page.evaluate("seen"), "[...document.querySelectorAll('.lane .text')]"
    ahead, plain = page.evaluate(f"{texts}.map(t => t.textContent.length)")
    assert seen == sorted(seen)
    assert [b for _, b in seen] == sorted(b for _, b in seen)
    assert any(0 < a < ahead and 0 < b < plain for a, b in seen)
    left, right = (lane.bounding_box() for lane in page.locator(".lane").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    written = page.evaluate("document.querySelector('.text').textContent")
    assert page.evaluate(f"{texts}.map(t => t.textContent)") == [written, written]
    assert fits(page)
    context.close()


def test_a_lossy_rule_draws_its_drift(page):
    write(page, tokens=24, rule="ears", temperature=1, seed=1)
    assert "Drift, mean so far" in page.inner_text(".drift")
    assert page.locator(".drift polyline").count() == 1


def test_a_conversation_reads_downwards_and_outlives_a_reload(page):
    sent = []
    page.on("request", lambda r: sent.append(r.post_data_json) if "chat" in r.url else None)
    page.click("#settings summary")
    page.fill("#system", "Answer shortly.")
    page.get_by_role("switch").check()
    chat(page, "Who are you?")
    chat(page, "Name a fruit.")
    assert [m["role"] for m in sent[-1]["messages"]] == ["system", "user", "assistant", "user"]
    turns = "[...document.querySelectorAll('.prompt, article > .text')].map(p => p.innerText)"
    before = page.evaluate(turns)
    assert before[::2] == ["Who are you?", "Name a fruit."]
    assert (
        page.locator("article").last.bounding_box()["y"] < page.locator("form").bounding_box()["y"]
    )
    saved = page.locator(".saved").all_inner_texts()
    page.reload()
    page.wait_for_selector("#rule option:nth-child(2)", state="attached")
    assert page.evaluate(turns) == before
    assert page.locator(".saved").all_inner_texts() == saved
    assert page.get_by_role("switch").is_checked()
    chat(page, "And a colour?")
    assert [m["content"] for m in sent[-1]["messages"]] == [
        "Answer shortly.",
        *before,
        "And a colour?",
    ]
    assert page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 1")
    page.get_by_role("button", name="Clear").click()
    page.reload()
    page.wait_for_selector("#rule option:nth-child(2)", state="attached")
    assert page.locator("article").count() == 0


def test_escape_stops_and_errors_are_shown(page):
    page.get_by_role("tab", name="Completion").click()
    page.click("#settings summary")
    page.fill("#tokens", "900")
    page.fill("#temperature", "1")
    page.fill("#prompt", "Once upon a time")
    page.keyboard.press("Enter")
    page.wait_for_selector("article .t")
    page.keyboard.press("Escape")
    page.wait_for_selector(".actions button:has-text('Race')")
    assert page.inner_text("#status").startswith("stopped")
    page.fill("#controller", "gamatune")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not(:empty)")
    assert "did you mean 'gammatune'" in page.inner_text("#error")
    assert page.locator("article").count() == 1


def test_it_asks_for_a_key_where_one_is_needed(browser, pair):
    with running(pair, api_keys=("secret",)) as locked:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(locked.url)
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#rule option:nth-child(2)", state="attached")
        assert page.inner_text("#about").startswith("forerun")
        page.evaluate("dispatchEvent(new Event('pagehide'))")
        assert "secret" not in page.evaluate("sessionStorage.getItem('forerun')")
        page.close()


CONTRAST = """() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).reduce((sum, v, i) => sum + [0.2126, 0.7152, 0.0722][i] *
    (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4), 0);
  const behind = (node) => {
    const c = parts(getComputedStyle(node).backgroundColor);
    return c.length < 4 || c[3] > 0 ? c : behind(node.parentElement);
  };
  return [...document.querySelectorAll("span, label, button:enabled, summary, h1, p, h3, textarea")]
    .filter((node) => node.textContent.trim() && node.checkVisibility())
    .map((node) => [node, light(parts(getComputedStyle(node).color)), light(behind(node))])
    .filter(([, a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5)
    .map(([node]) => node.textContent);
}"""


@pytest.mark.parametrize(("width", "scheme"), spread(2, [390, 1280], ["dark", "light"]))
def test_it_fits_and_reads(browser, shipped, width, scheme):
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(shipped.url)
    page.wait_for_selector("#rule option:nth-child(2)", state="attached")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"dark": "rgb(13, 17, 23)", "light": "rgb(255, 255, 255)"}[scheme]
    assert page.locator("#settings").evaluate("d => d.open") == (width == 1280)
    page.get_by_role("switch").check()
    write(page, tokens=24, controller="fixed(3)")
    page.get_by_role("button", name="Race").click()
    page.wait_for_selector(".verdict")
    for summary in page.locator("article summary").all():
        summary.click()
    assert fits(page)
    assert page.evaluate(CONTRAST) == []
    for name in ("Send", "Clear"):
        assert page.get_by_role("button", name=name).is_visible()
    context.close()
