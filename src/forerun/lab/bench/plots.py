"""The bench's plots, each as PNG and as SVG that follows the page's light or dark colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import MissingExtraError
from forerun.lab.bench import report
from forerun.lab.bench.report import ALL, Cell, Document

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
FEW = 6
"""Measurements below which a bootstrap interval is far too narrow: no test of fewer can tell a
change from chance."""
KINDS = {"plain": "#6e7781", "forerun": "#0969da", "peer": "#bc4c00"}
SERIES = (
    "#0a6cd6", "#c2500a", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e7c86", "#cf222e",
)  # fmt: skip
MARKERS = "osD^vPX*"  # of the lines in order, as `SERIES` are their colours

DARK = {
    INK: "#e6edf3", MUTED: "#9198a1", GRID: "#3d444d", PAPER: "#0d1117",
    KINDS["plain"]: "#9ea7b1", KINDS["forerun"]: "#4493f8", KINDS["peer"]: "#f0883e",
    "#0a6cd6": "#58a0ff", "#c2500a": "#f28b45", "#1a7f37": "#3fb950", "#8250df": "#ab7df8",
    "#bf3989": "#f778ba", "#9a6700": "#d29922", "#0e7c86": "#39c5cf", "#cf222e": "#ff7b72",
}  # fmt: skip
"""Every colour of the plots and what it becomes on a dark page."""


@dataclass(frozen=True)
class Plot:
    """A figure that can be saved."""

    name: str
    """Name of the PNG file."""
    caption: str
    """How to read it."""
    alt: str
    """What it shows, as text."""
    figure: Any

    def png(self, folder: Path) -> Path:
        """Write NAME.png."""
        path = folder / f"{self.name}.png"
        with _style():
            self.figure.savefig(path, dpi=160, facecolor=PAPER, metadata={"Software": None})
        return path

    def svg(self) -> str:
        """An `<svg>` element whose colours are CSS variables, see `variables`."""
        text = io.StringIO()
        with _style(self.name):
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        drawn = text.getvalue()
        drawn = drawn[drawn.index("<svg") :]
        drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
        # Ids are made unique: the page holds several drawings.
        drawn = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", drawn)
        for colour in DARK:
            drawn = drawn.replace(colour, f"var({_variable(colour)})")
        return re.sub(
            r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"',
            r'<svg role="img" style="width:100%;max-width:\g<2>pt;height:auto" \g<1>',
            drawn,
            count=1,
        )


def variables(dark: bool) -> str:
    """CSS that sets the plots' colours."""
    return " ".join(f"{_variable(c)}: {d if dark else c};" for c, d in DARK.items())


def _variable(colour: str) -> str:
    return f"--c{colour[1:]}"


def draw(document: Document, cells: Sequence[Cell]) -> list[Plot]:
    """All plots the results have data for."""
    first = min((c.batch for c in cells), default=1)
    smallest = [c for c in cells if c.batch == first]
    with _style():
        plots = [
            _speedups(document, smallest),
            _prompts(document, smallest),
            _lengths(document, first),
            _shares(document),
            _batches(document, cells),
        ]
    return [plot for plot in plots if plot is not None]


def _speedups(document: Document, cells: Sequence[Cell]) -> Plot | None:
    names = [n for n in _names(document) if n != "plain" and any(c.method == n for c in cells)]
    panels = list(dict.fromkeys(c.family for c in cells))
    panels = [ALL, *(p for p in panels if p != ALL)] if len(panels) > 2 else panels[:1]
    if not names:
        return None
    figure, axes = _grid(len(panels), len(names))
    most = max(c.speedup["high"] for c in cells)
    for axis, family in zip(axes, panels, strict=False):
        for y, name in enumerate(names):
            shown = [c for c in cells if (c.family, c.method) == (family, name)]
            if not shown:
                continue
            s = shown[0].speedup
            axis.barh(y, s["mean"], height=0.62, color=_colour(document, name), linewidth=0)
            axis.plot([s["low"], s["high"]], [y, y], color=INK, linewidth=1.3, zorder=4)
            _value(axis, s["high"] + most * 0.025, y, f"{s['mean']:.2f}×")
        _bars(axis, names, _title(family))
        axis.set_xlim(0, most * 1.24)
        axis.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    _legend(figure, document)
    warning = _few_measured(c.speedup["n"] for c in cells if c.family in panels)
    text = f"speed-up over plain decoding (1: as fast; line: 95 % interval){warning}"
    figure.supxlabel(text, fontsize=9)
    overall = {c.method: c.speedup for c in cells if c.family in (ALL, panels[0])}
    figures = ", ".join(f"{n} {report.show(overall[n])}" for n in names if n in overall)
    caption = "Speed-up per family: geometric mean over the prompts, with its 95 % interval"
    caption += f"{warning.replace(chr(10), '; ')}."
    return Plot("speedup", caption, f"Bars of the speed-up: {figures}.", figure)


def _few_measured(counts: Iterable[float]) -> str:
    """A warning where bars rest on too few measurements for their intervals to mean much."""
    least = int(min(counts))
    if least >= FEW:
        return ""
    return f"\nsome bars rest on {least} measurement{'' if least == 1 else 's'} only: read as rough"


def _prompts(document: Document, cells: Sequence[Cell]) -> Plot | None:
    names = [n for n in _names(document) if n != "plain"]
    ratios = {c.method: np.array(c.ratios) for c in cells if c.family == ALL}
    names = [n for n in names if n in ratios]
    if not names:
        return None
    figure, (axis,) = _grid(1, len(names), wide=True, row=0.42)
    jitter = np.random.default_rng(0)
    for y, name in enumerate(names):
        own = ratios[name]
        colour = _colour(document, name)
        height = y + jitter.uniform(-0.24, 0.24, len(own))
        axis.scatter(own, height, s=9, color=colour, alpha=0.45, linewidths=0)
        low, middle, high = np.quantile(own, [0.1, 0.5, 0.9])
        axis.plot([low, high], [y, y], color=INK, linewidth=1.2)
        axis.plot([middle, middle], [y - 0.3, y + 0.3], color=INK, linewidth=2)
    _bars(axis, names, "")
    _log2(axis, np.concatenate([ratios[n] for n in names]))
    axis.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    unit = "prompt" if cells[0].batch == 1 else f"batch of {cells[0].batch} prompts"
    _legend(figure, document)
    axis.set_xlabel("speed-up over plain decoding (logarithmic)", fontsize=9)
    slow = ", ".join(
        f"{n}: median {np.median(ratios[n]):.2f}, {np.mean(ratios[n] < 1) * 100:.0f} % below 1"
        for n in names
    )
    caption = f"A dot per {unit}. Thick tick: the median. Line: 10th to 90th percentile."
    return Plot("prompts", caption, f"Distribution over the prompts. {slow}.", figure)


def _lengths(document: Document, batch: int) -> Plot | None:
    counts: dict[str, dict[int, int]] = {}
    for s in document["samples"]:
        if s["batch"] == batch and s["lengths"] and s["method"] != "plain":
            mine = counts.setdefault(s["method"], {})
            for accepted, n in s["lengths"].items():
                mine[int(accepted)] = mine.get(int(accepted), 0) + n
    names = [n for n in _names(document) if n in counts]
    if not names:
        return None
    longest = max(max(c) for c in counts.values())
    shares = {
        n: np.array([counts[n].get(k, 0) for k in range(longest + 1)]) / sum(counts[n].values())
        for n in names
    }
    figure, axes = _grid(len(names), 4, row=0.36)
    top = max(s.max() for s in shares.values())
    for axis, name in zip(axes, names, strict=True):
        axis.bar(range(longest + 1), shares[name] * 100, color=KINDS["forerun"], width=0.8)
        mean = float(shares[name] @ np.arange(longest + 1))
        axis.axvline(mean, color=INK, linewidth=1.2)
        near = mean > longest / 2
        axis.text(
            mean + (-0.02 if near else 0.02) * (longest + 1), top * 108,
            f"mean {mean:.1f}", ha="right" if near else "left", va="top", fontsize=8, color=INK,
        )  # fmt: skip
        axis.set_title(_short(name), fontsize=9, loc="left")
        axis.set_ylim(0, top * 112)
        axis.grid(axis="y", color=GRID, linewidth=0.7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("drafted tokens kept in a round", fontsize=9)
    figure.supylabel("share of rounds (%)", fontsize=9)
    figures = ", ".join(f"{n} {float(shares[n] @ np.arange(longest + 1)):.1f}" for n in names)
    caption = "Drafted tokens kept per round; each round adds one token of the target's own."
    return Plot("accepted", caption, f"Histograms; mean kept per round: {figures}.", figure)


def _shares(document: Document) -> Plot | None:
    shares = document.get("shares")
    if not shares:
        return None
    cells = shares["cells"]
    names = list(dict.fromkeys(c["controller"] for c in cells))
    panels = list(dict.fromkeys(c["family"] for c in cells))
    panels = [ALL, *(p for p in panels if p != ALL)]
    figure, axes = _grid(len(panels), len(names))
    for axis, family in zip(axes, panels, strict=True):
        mine = {c["controller"]: c for c in cells if c["family"] == family}
        for y, name in enumerate(names):
            s = {k: v * 100 for k, v in mine[name]["oracle"].items()}
            axis.barh(y, s["mean"], height=0.62, color=KINDS["forerun"], linewidth=0)
            axis.plot([s["low"], s["high"]], [y, y], color=INK, linewidth=1.3, zorder=4)
            _value(axis, s["high"] + 3, y, f"{s['mean']:.0f} %")
        _bars(axis, names, _title(family))
        # Equal for every controller.
        cell = mine[names[0]]
        informed = 100 * cell["oracle"]["mean"] / cell["informed"]["mean"]
        axis.axvline(informed, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axis.set_xlim(0, 122)
        axis.set_xticks([0, 25, 50, 75, 100])
    figure.supxlabel("speed as a share of the oracle's (%; dashed: informed bound)", fontsize=9)
    figures = ", ".join(
        f"{c['controller']} {c['oracle']['mean'] * 100:.0f} %" for c in cells if c["family"] == ALL
    )
    caption = (
        "Share of the clairvoyant oracle's speed, with its 95 % interval. Dashed: the informed "
        "bound, the best that sees only what a controller sees."
    )
    return Plot("oracle", caption, f"Of the oracle's speed, overall: {figures}.", figure)


def _batches(document: Document, cells: Sequence[Cell]) -> Plot | None:
    sizes = sorted({c.batch for c in cells})
    if len(sizes) < 2:
        return None
    overall = [c for c in cells if c.family == ALL]
    names = [n for n in _names(document) if len([c for c in overall if c.method == n]) > 1]
    figure, (left, right) = _grid(2, 8, columns=2)
    for i, name in enumerate(names):
        mine = [c for c in overall if c.method == name]
        style = {
            "color": MUTED if name == "plain" else SERIES[i % len(SERIES)],
            "marker": MARKERS[(i + i // len(SERIES)) % len(MARKERS)],
            "linestyle": (0, (4, 2)) if name == "plain" else "-" if i <= len(SERIES) else "-.",
            "markersize": 5,
        }
        at = [c.batch for c in mine]
        left.plot(at, [c.ms_per_token for c in mine], label=_short(name), **style)
        right.plot(at, [c.tokens_per_second for c in mine], **style)
    for axis, title in ((left, "Latency: ms per token, per text"),
                        (right, "Throughput: tokens per second, all texts")):  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(s) for s in sizes])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("texts decoded together (batch)", fontsize=9)
        axis.grid(color=GRID, linewidth=0.7)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figures = "; ".join(
        f"{c.method} at {c.batch}: {c.ms_per_token:.2f} ms, {c.tokens_per_second:.0f} tokens/s"
        for c in overall
        if c.batch in (sizes[0], sizes[-1]) and c.method in names
    )
    caption = "Latency (lower is better) and throughput (higher is better) against the batch size."
    return Plot("batch", caption, f"Lines. {figures}.", figure)


def _names(document: Document) -> list[str]:
    return [m["name"] for m in report.methods(document)]


def _colour(document: Document, name: str) -> str:
    return KINDS[next(m["kind"] for m in document["methods"] if m["name"] == name)]


def _legend(figure: Any, document: Document) -> None:
    """A legend of the colours, where there are peers."""
    if not any(m["kind"] == "peer" for m in report.methods(document)):
        return
    from matplotlib.patches import Patch

    labels = {"forerun": "forerun", "peer": "other implementations"}
    figure.legend(
        handles=[Patch(color=KINDS[kind], label=label) for kind, label in labels.items()],
        loc="outside upper right",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _title(family: str) -> str:
    return "all families" if family == ALL else family


def _short(name: str, most: int = 34) -> str:
    """A label that fits: long settings are broken over two lines."""
    if len(name) <= most:
        return name
    head, bracket, rest = name.partition("(")
    return f"{head}\n{bracket}{rest}" if bracket else name


def _grid(
    panels: int, bars: int, *, columns: int = 4, row: float = 0.3, wide: bool = False
) -> tuple[Any, list[Any]]:
    """A figure of equal panels that share their axes, as tall as its bars need."""
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = -(-panels // columns)
    width = 9.4 if columns > 1 or wide else 6.4
    figure = Figure(figsize=(width, 0.55 + rows * (0.55 + row * max(bars, 2))))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=columns != 2)
    flat = list(axes.flat)
    for axis in flat[panels:]:
        axis.set_visible(False)
    for above in flat[max(panels - columns, 0) : panels]:
        above.tick_params(labelbottom=True)  # also where the last row is not full
    for axis in flat:
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, flat[:panels]


def _bars(axis: Any, names: Sequence[str], title: str) -> None:
    """One horizontal bar per name, the first on top."""
    axis.set_yticks(range(len(names)), [_short(n) for n in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=GRID, linewidth=0.7)
    axis.set_title(title, fontsize=9, loc="left")


def _value(axis: Any, x: float, y: float, text: str) -> None:
    """A bar's number, readable also where a line crosses it."""
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
    axis.text(x, y, text, va="center", fontsize=8, color=INK, bbox=box, zorder=5)


def _log2(axis: Any, values: Any) -> None:
    """A logarithmic axis with labels like 0.5×, 1×, 2×."""
    low, high = float(values.min()), float(values.max())
    axis.set_xscale("log", base=2)
    fine = high / low < 4
    steps = [0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 16]
    ticks = [t for t in steps if fine or t in (0.25, 0.5, 1, 2, 4, 8, 16)]
    low, high = min(low, 0.9) * 0.95, max(high, 1.1) * 1.05
    axis.set_xticks([t for t in ticks if low <= t <= high])
    axis.set_xticklabels([f"{t:g}×" for t in ticks if low <= t <= high])
    axis.minorticks_off()
    axis.set_xlim(low, high)


def require_matplotlib() -> None:
    """Raise before the work what drawing would raise after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError.of("matplotlib", "lab")


@contextmanager
def _style(salt: str = "forerun") -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.edgecolor": MUTED,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "svg.hashsalt": salt,
            "svg.fonttype": "path",
            "lines.linewidth": 1.6,
        }
    ):
        yield
