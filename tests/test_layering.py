"""Imports point one way, and the light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent

LAYERS = [
    [
        "errors",
        "types",
        "registry",
        "signals",
        "arrays",
        "cache",
        "checks",
        "confidence",
        "costs",
        "languages",
        "lazy",
        "chat",
    ],
    ["controllers", "rules"],
    ["governors"],
    ["requests"],
    ["runtime"],
    ["drafters"],
    ["engine"],
    ["testing", "training", "zoo", "settings"],
    ["prompts"],
    ["model"],
    ["grammar"],
    ["lab", "hosts", "serve"],
    ["transformers", "vllm"],
    ["cli"],
]
ALLOWED: dict[str, set[str]] = {}
"""What each part of the package may import (its own modules aside)."""
for layer in LAYERS:
    ALLOWED.update(dict.fromkeys(layer, set(ALLOWED) - {"testing"}))
ALLOWED.update(
    {
        name: {"errors"}
        for name in (
            "types",
            "cache",
            "registry",
            "checks",
            "languages",
        )
    }
)
CHECKED = {"errors", "checks"}
ALLOWED.update(signals={"errors", "lazy", "types"}, arrays={"lazy", "signals", "types"})
ALLOWED.update(costs=CHECKED, chat=CHECKED, confidence=CHECKED)


def imported(path: Path, root: Path = ROOT) -> set[str]:
    """Parts of forerun that a file imports, wherever in the file the import stands."""
    inside = ("forerun", *path.relative_to(root).with_suffix("").parts)
    imports = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(inside[: len(inside) - node.level]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names = {alias.name for alias in node.names}
            imports |= {f"forerun.{n}" for n in names} if module == "forerun" else {module}
    return {name.split(".")[1] for name in imports if name.startswith("forerun.")}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or not p.stem.startswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    part = part_of(path)
    assert part in ALLOWED, f"say in ALLOWED which layer {part!r} belongs to"
    # Names of the package itself, `from forerun import Model`, are those of `forerun.model`.
    used = {n if n in ALLOWED else "model" for n in imported(path) if not n.startswith("__")}
    assert used <= ALLOWED[part] | {part}, f"{part} must not import {used - ALLOWED[part] - {part}}"


def test_the_reader_of_imports_sees_every_form(tmp_path):
    (tmp_path / "engine").mkdir()
    file = tmp_path / "engine" / "loop.py"
    file.write_text(
        "import forerun.lab.traces.record as r\nfrom forerun import zoo, __version__\n"
        "from ..hosts import vllm\nfrom . import round\n"
        "def late():\n    from forerun.serve.http import app\n"
    )
    assert imported(file, tmp_path) == {"lab", "zoo", "__version__", "hosts", "engine", "serve"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("forerun", ["torch", "transformers"]),
        ("forerun.controllers", ["torch", "transformers"]),
        ("forerun.rules", ["torch", "transformers"]),
    ],
)
def test_light_packages_stay_light(module, heavy):
    code = (
        f"import sys, importlib; m = importlib.import_module({module!r})\n"
        "table = getattr(m, 'CONTROLLERS', None) or getattr(m, 'RULES', None)\n"
        "[table.load(n) for n in table.names()] if table else None\n"
        f"print([n for n in {heavy!r} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
