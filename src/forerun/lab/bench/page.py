"""The bench's report as one HTML page without any outside file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import Any

from forerun.lab.bench import plots, report
from forerun.lab.bench.bench import Results
from forerun.lab.bench.methods import PLAIN
from forerun.lab.bench.plots import Plot
from forerun.lab.bench.report import ALL, Cell, Document

PAGE = "report.html"  # file of the report, beside the results
TEMPLATE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ink: #1f2328; --muted: #59636e; --line: #d1d9e0; --paper: #fff; --soft: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e; $light }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #9198a1; --line: #3d444d;
  --paper: #0d1117; --soft: #161b22; --good: #3fb950; --bad: #ff7b72; $dark } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; color: var(--ink);
  background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; padding-top: .9rem;
  border-top: 1px solid var(--line); }
p, li { max-width: 48rem; }
.muted, figcaption { color: var(--muted); font-size: .9rem; }
.lead { font-size: 1.1rem; }
.scroll { overflow-x: auto; margin: .4rem 0 1rem; }
.caption { margin: .6rem 0 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th { font-weight: 600; background: var(--soft); }
th:first-child, td:first-child { text-align: left; }
tbody th { background: none; font-weight: 400; font-family: ui-monospace, monospace;
  font-size: .82rem; white-space: normal; min-width: 9rem; }
td small { color: var(--muted); display: block; font-size: .78rem; }
.wrap th, .wrap td { white-space: normal; text-align: left; overflow-wrap: anywhere; }
.best { font-weight: 650; }
.slow { color: var(--bad); }
figure { margin: .5rem 0 1.4rem; }
code { font-family: ui-monospace, monospace; font-size: .88em; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; max-width: 46rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="muted">$subtitle</p>
<p class="lead">$lead</p>
$warnings
$body
</body>
</html>
""")

WORDS = """<dl>
<dt>speed-up</dt><dd>Plain decoding's seconds per token over the method's, on the same prompt in the
same run; above 1 is faster. Figures of many prompts are geometric means, in brackets a 95&nbsp;%
interval (bootstrap over the prompts). If two intervals are far apart, the difference is not
noise.</dd>
<dt>plain</dt><dd>The target model alone, one token per pass, through the same engine.</dd>
<dt>tokens/s</dt><dd>Output tokens of all texts of a batch over the wall time, prompt included.</dd>
<dt>ms/token</dt><dd>What the reader of one text waits per token, prompt included.</dd>
<dt>first token</dt><dd>Median time from the start to the first tokens that stay.</dd>
<dt>tokens/round</dt><dd>Tokens written per pass of the target (block efficiency).</dd>
<dt>kept</dt><dd>Share of the drafted tokens that were kept.</dd>
<dt>identical</dt><dd>Share of the outputs that equal plain decoding's token for token. A lossless
method may still differ where two tokens are tied within rounding; <code>forerun audit</code> tells
such a tie from a bug.</dd>
</dl>"""


def write(results: Results) -> list[Cell]:
    """Write results, report and plots of what there is; the figures."""
    document = results.document
    cells = report.cells(document)
    document["summary"] = [c.to_json() for c in cells]
    results.write()
    if cells:
        drawn = plots.draw(document, cells)
        for plot in drawn:
            plot.png(results.folder)
        text = render(document, cells, drawn)
        (results.folder / PAGE).write_text(text, encoding="utf-8")
    return cells


def render(document: Document, cells: Sequence[Cell], drawn: Sequence[Plot]) -> str:
    """The whole page."""
    first = min(report.batches(document))
    figures = {plot.name: plot for plot in drawn}
    smallest = [c for c in cells if c.batch == first]
    parts = [
        _section("Overall", _overall(document, smallest, first)),
        _section("Per family", _families(document, smallest), _figure(figures.get("speedup"))),
        _section("Against other implementations", _peers(document, first)),
        _section("Per prompt", _figure(figures.get("prompts"))),
        _section("How far the draft carries", _figure(figures.get("accepted"))),
        _section("How much is possible", _shares(document), _figure(figures.get("oracle"))),
        _section("Batches", _figure(figures.get("batch")), _batches(document, cells)),
        _section("Words", WORDS),
        _section("How it was measured", _method(document), _provenance(document)),
    ]
    settings = document["settings"]
    title = "Speculative decoding, measured"
    newest = document["provenance"][-1]
    subtitle = (
        f"forerun bench · target {settings['target']} · draft {settings['draft']} · "
        f"{newest['date']} · {newest['cpu']}"
    )
    return TEMPLATE.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        lead=_lead(document, smallest, first),
        warnings=_warnings(document),
        body="\n".join(filter(None, parts)),
        light=plots.variables(False),
        dark=plots.variables(True),
    )


def _lead(document: Document, cells: Sequence[Cell], batch: int) -> str:
    """The result in two sentences."""
    overall = {c.method: c for c in cells if c.family == ALL}
    ours = [m["name"] for m in report.methods(document) if m["kind"] == "forerun"]
    lossy = {m["name"] for m in document["methods"] if m.get("lossless") is False}
    ours = [name for name in ours if name not in lossy] or ours
    ranked = sorted(ours, key=lambda n: -overall[n].speedup["mean"])
    if not ranked:
        return "Plain decoding only; name controllers to compare it with."
    best = overall[ranked[0]]
    count = len({p for s in document["samples"] for p in s["prompts"]})
    text = (
        f"Over {count} prompts of {_count(len(report.families(document)), 'family', 'families')}, "
        f"<code>{escape(ranked[0])}</code> wrote <b>{best.speedup['mean']:.2f} times</b> as fast "
        f"as plain decoding (95&nbsp;% interval {best.speedup['low']:.2f} to "
        f"{best.speedup['high']:.2f})"
    )
    text += f", {_count(batch, 'text', 'texts')} at a time." if batch > 1 else "."
    if len(ranked) > 1:
        text += (
            f" It was the fastest of {len(ranked)} {'lossless ' if lossy else ''}settings tried."
        )
    rivals = report.against(document, batch)
    best_of = report.best_settings(document, batch)
    for peer in _peer_names(document, rivals):
        if (ranked[0], peer) in rivals and best_of.get(report.base(peer), peer) == peer:
            spread = rivals[ranked[0], peer]
            text += (
                f" Against <code>{escape(peer)}</code> it was {spread['mean']:.2f} times as fast "
                f"({spread['low']:.2f} to {spread['high']:.2f})."
            )
    return text


def _warnings(document: Document) -> str:
    lines = []
    if not document["complete"]:
        lines.append(
            "This run was interrupted: figures cover the prompts measured so far. The same "
            "command goes on from here."
        )
    lines += [
        f"<code>{escape(s['name'])}</code> was not measured: {escape(s['reason'])}."
        for s in document["skipped"]
    ]
    fewest = int(min(c.speedup["n"] for c in report.cells(document)))
    if fewest < 20:
        lines.append(
            f"Some figures rest on {_count(fewest, 'measurement', 'measurements')} only: read the "
            "intervals as rough."
        )
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>" if lines else ""


def _overall(document: Document, cells: Sequence[Cell], batch: int) -> str:
    overall = {c.method: c for c in cells if c.family == ALL}
    best = max((c.speedup["mean"] for c in overall.values()), default=1.0)
    rows = []
    for method in report.methods(document):
        c = overall.get(method["name"])
        if c is None:
            continue
        lossy = method.get("lossless") is False
        rows.append(
            [
                _label(c.method) + ("<br>(lossy)" if lossy else ""),
                "1" if c.method == PLAIN else _spread(c, best),
                f"{c.tokens_per_second:,.0f}",
                f"{c.ms_per_token:.2f}",
                "–" if c.ttft_ms is None else f"{c.ttft_ms:.1f}",
                "–" if c.tokens_per_round is None else f"{c.tokens_per_round:.2f}",
                _percent(c.acceptance),
                "–" if c.method == PLAIN else _percent(c.identical),
            ]
        )
    head = ["method", "speed-up", "tokens/s", "ms/token", "first token (ms)", "tokens/round",
            "kept", "identical"]  # fmt: skip
    at = "one text at a time" if batch == 1 else f"{batch} texts at a time"
    return _table(head, rows, f"All families together, {at}.")


def _families(document: Document, cells: Sequence[Cell]) -> str:
    names = [*report.families(document)]
    by_family = {(c.method, c.family): c for c in cells}
    best = {f: max(c.speedup["mean"] for c in cells if c.family == f) for f in {*names, ALL}}
    shown = [ALL, *names] if len(names) > 1 else names
    rows = []
    for method in report.methods(document):
        if method["name"] == PLAIN:
            continue
        row = [_label(method["name"])]
        for family in shown:
            c = by_family.get((method["name"], family))
            row.append("–" if c is None else _spread(c, best[family]))
        rows.append(row)
    if not rows:
        return ""
    sizes = {c.speedup["n"] for c in cells if c.family != ALL}
    n = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    caption = f"Speed-up over plain decoding; {n} measurements per family. Bold: the highest."
    return _table(["method", *shown], rows, caption)


def _peers(document: Document, batch: int) -> str:
    rivals = report.against(document, batch)
    peers = _peer_names(document, rivals)
    if not peers:
        return ""
    own = list(dict.fromkeys(mine for mine, _ in rivals))
    rows = [
        [_label(mine)]
        + [
            "–" if (mine, peer) not in rivals
            else f"{rivals[mine, peer]['mean']:.2f}<small>{_between(rivals[mine, peer])}</small>"
            for peer in peers
        ]
        for mine in own
    ]  # fmt: skip
    best = "".join(
        f"<p>The best of the settings of <code>{escape(name)}</code> measured here is "
        f"<code>{escape(setting)}</code>.</p>"
        for name, setting in report.best_settings(document, batch).items()
    )
    head = ["times as fast as →", *map(_label, peers)]
    caption = (
        "Seconds per token of the column over those of the row; above 1 the row is faster. Same "
        "weights, same prompts, same process (vLLM: its own)."
    )
    return _table(head, rows, caption) + best


def _batches(document: Document, cells: Sequence[Cell]) -> str:
    sizes = report.batches(document)
    if len(sizes) < 2:
        return ""
    by_batch = {(c.method, c.batch): c for c in cells if c.family == ALL}
    rows = []
    for method in report.methods(document):
        row = [_label(method["name"])]
        for size in sizes:
            c = by_batch.get((method["name"], size))
            row.append(
                "–" if c is None else f"{c.speedup['mean']:.2f}<small>{c.ms_per_token:.2f} ms · "
                f"{c.tokens_per_second:,.0f}/s</small>"
            )  # fmt: skip
        rows.append(row)
    head = ["method", *(f"batch {size}" for size in sizes)]
    caption = (
        "Speed-up over plain decoding at the same batch size; below it milliseconds per token of "
        "one text, and tokens per second of all."
    )
    return _table(head, rows, caption)


def _shares(document: Document) -> str:
    shares = document.get("shares")
    if not shares:
        return ""
    by_family = {(c["controller"], c["family"]): c for c in shares["cells"]}
    names = list(dict.fromkeys(c["controller"] for c in shares["cells"]))
    families = [ALL, *dict.fromkeys(c["family"] for c in shares["cells"] if c["family"] != ALL)]
    rows = []
    for name in names:
        row = [_label(name)]
        for family in families:
            c = by_family[name, family]
            row.append(
                f"{c['oracle']['mean'] * 100:.1f} %<small>informed "
                f"{c['informed']['mean'] * 100:.1f} %</small><small>fixed "
                f"{c['best_fixed']['mean'] * 100:.1f} %</small>"
            )
        rows.append(row)
    text = (
        f"<p>Replayed over a recorded trace of {shares['prompts']} prompts at given costs (the "
        f"target's pass takes {shares['cost_ratio']:.1f} times as long as a drafted token), so "
        "without timing noise. The clairvoyant oracle knows beforehand which tokens will be kept: "
        "no real method reaches it. The informed bound sees only what a real controller sees, and "
        "was fitted in hindsight, one policy for all families: within one family a method may be "
        "above it. The best fixed length is likewise the best single one."
        "</p>"
    )
    caption = (
        "Speed as a share of the oracle's; below it of the informed bound's and the best length's."
    )
    return text + _table(["controller", *families], rows, caption)


def _method(document: Document) -> str:
    s = document["settings"]
    heat = (
        "greedily" if s["temperature"] == 0
        else f"at temperature {s['temperature']:g}, the end of text ignored so that all methods "
             "write texts of one length"
    )  # fmt: skip
    return (
        "<p>Per prompt all methods ran side by side in one process, in an order drawn for "
        "each; before that each wrote a few tokens that do not count. Texts were "
        f"written {heat}, at most {s['max_new_tokens']} tokens. Times are wall times of whole "
        "requests, the prompt's processing included. Every sample is in <code>results.json</code>."
        "</p>"
    )


def _provenance(document: Document) -> str:
    s = document["settings"]
    rows = [[name.replace("_", " "), escape(_text(value))] for name, value in s.items()]
    several = len(document["provenance"]) > 1
    for number, part in enumerate(document["provenance"], start=1):
        rows += [
            [f"{name.replace('_', ' ')}{f' (part {number})' if several else ''}",
             escape(_text(value))]
            for name, value in part.items()
        ]  # fmt: skip
    return _table(["what", "value"], rows, "Settings and machine.", "wrap")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    return "–" if value is None else str(value)


def _label(name: str) -> str:
    """A method's name for a narrow column: long settings go on a line of their own."""
    head, bracket, rest = escape(name).partition("(")
    return f"{head}<wbr>{bracket}{rest.replace(',', ',<wbr>')}" if bracket else head


def _peer_names(document: Document, rivals: Iterable[tuple[str, str]]) -> list[str]:
    measured = {peer for _, peer in rivals}
    return [m["name"] for m in report.methods(document) if m["name"] in measured]


def _spread(cell: Cell, best: float) -> str:
    s = cell.speedup
    kind = "best" if s["mean"] >= best else "slow" if s["high"] < 1 else ""
    mean = f'<span class="{kind}">{s["mean"]:.2f}</span>' if kind else f"{s['mean']:.2f}"
    return f"{mean}<small>{_between(s)}</small>"


def _between(spread: dict[str, float]) -> str:
    return f"[{spread['low']:.2f}, {spread['high']:.2f}]"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f} %"


def _count(number: float, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def _figure(plot: Plot | None) -> str:
    if plot is None:
        return ""
    drawn = plot.svg().replace("<svg ", f'<svg aria-label="{escape(plot.alt)}" ', 1)
    return f"<figure>{drawn}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _section(title: str, *parts: str) -> str:
    inside = "\n".join(filter(None, parts))
    return f"<section><h2>{title}</h2>\n{inside}\n</section>" if inside else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, kind: str = "") -> str:
    """Cells are HTML; the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{c}</td>" for c in rest) + "</tr>\n"
        for first, *rest in rows
    )
    # Not a <caption>: that is as wide as the table and would be cut with it on small screens.
    above = f'<p class="muted caption">{caption}</p>' if caption else ""
    return (
        f'{above}<div class="scroll" tabindex="0"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
