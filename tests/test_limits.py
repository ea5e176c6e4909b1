"""Functions stay short, their parameters few, and imports without circles."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent
RECIPES = Path(__file__).parent.parent / "recipes"
FILES = [*ROOT.rglob("*.py"), *RECIPES.rglob("*.py")]
NAMED: dict[type[ast.AST], str] = {
    ast.arg: "arg", ast.Name: "id", ast.FunctionDef: "name", ast.ClassDef: "name"
}  # fmt: skip
"""Nodes with a name, and the field that holds it."""
LINES, PARAMETERS = 60, 8
"""Most of a function; command signatures do not count."""

GLOSSARY = Path(__file__).parent.parent / "docs" / "glossary.md"

CIRCLES: set[frozenset[str]] = set()
"""Circles of imports, which may only become fewer; those for types and within functions count."""


@cache
def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def functions(tree: ast.AST, path: tuple[str, ...] = ()):
    """Functions and methods with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ".".join((*path, node.name)), node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from functions(node, (*path, node.name))


def is_command(node: ast.FunctionDef) -> bool:
    """Whether the signature is a list of options."""
    return sum("option" in ast.unparse(a.annotation or ast.Constant(0)).lower()
               for a in [*node.args.args, *node.args.kwonlyargs]) > 1  # fmt: skip


def length(node: ast.FunctionDef) -> int:
    """Lines of a function; of a command those behind its options and its help."""
    first = node.body[1].lineno if is_command(node) and len(node.body) > 1 else node.lineno
    return (node.end_lineno or first) - first + 1


def test_functions_are_short_and_parameters_few():
    over = set()
    for file in FILES:
        for name, node in functions(parsed(file)):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([a for a in args if a.arg not in ("self", "cls")])
            whole = (node.end_lineno or 0) - node.lineno + 1
            if (whole > LINES and length(node) > LINES) or (
                count > PARAMETERS and not is_command(node)
            ):
                over.add(f"{file.name}:{name}")
    assert over == set(), f"more than {LINES} lines or {PARAMETERS} parameters"


def weak_names() -> set[str]:
    """What the glossary's last column rules out."""
    rows = [s.split("|") for s in GLOSSARY.read_text("utf-8").splitlines() if s.startswith("| *")]
    return {word for row in rows for word in re.findall(r"`(\w+)`", row[3])}


def test_names_are_those_of_the_glossary():
    weak, used = weak_names(), set()
    assert {"found", "Crew", "Guide"} <= weak
    for file in ROOT.rglob("*.py"):
        for node in nodes(file):
            for kind, field in NAMED.items():
                if isinstance(node, kind) and getattr(node, field) in weak:
                    used.add(f"{file.name}:{node.lineno}: {getattr(node, field)}")
    assert used == set()


def test_the_glossary_names_what_there_is():
    text = GLOSSARY.read_text(encoding="utf-8")
    named = {word for row in text.splitlines() for word in re.findall(r"\(`(\w+)`\)", row)}
    assert named <= {name for file in ROOT.rglob("*.py") for name in re.findall(r"^class (\w+)",
                     file.read_text(encoding="utf-8"), re.MULTILINE)}  # fmt: skip


def test_docstrings_of_methods_say_more_than_their_names():
    """Four words or fewer are no sentence: leave them out, or say what a reader needs."""
    short = set()
    for file in ROOT.rglob("*.py"):
        tree = parsed(file)
        for name, node in functions(tree):
            text = ast.get_docstring(node) or "`"
            alone = len(node.body) == 1  # a protocol's: it is the body
            if "." in name and len(text.split()) <= 4 and "`" not in text and not alone:
                short.add(f"{file.relative_to(ROOT)}:{name}")
    shown = ("serve/app.py", "serve/protocol.py")  # OpenAPI's descriptions
    assert {name for name in short if not name.startswith(shown)} == set()


def modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    return {
        ".".join(("forerun", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): file
        for file in ROOT.rglob("*.py")
    }


def imported(file: Path, known: set[str]) -> set[str]:
    """Modules among `known` that a file imports, wherever in it."""
    imports = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imports |= names & known or {node.module}
    return imports & known


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected parts of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for following in graph[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        reach[start] = seen
    components = (frozenset(n for n in seen if start in reach[n]) for start, seen in reach.items())
    return {part for part in components if len(part) > 1}


def test_imports_go_in_no_circles():
    files = modules()
    graph = {name: imported(file, set(files)) - {name} for name, file in files.items()}
    cycles = circles(graph)
    assert cycles - CIRCLES == set()
    assert CIRCLES - cycles == set(), "a circle is gone; take it from the list"


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, {frozenset("abc")}),
    ],
)
def test_circles_are_found(graph, wanted):
    assert circles(graph) == wanted


FLAGGED: set[str] = set()
"""Files of the library whose errors speak of the command line's flags; may only become fewer."""


def test_errors_of_the_library_name_arguments():
    """As `name`; the command line makes flags of them. A server's operator is at one."""
    flagged = set()
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).as_posix()
        if part.startswith(("cli/", "serve/")) or part.endswith("__main__.py"):
            continue
        for node in nodes(file):
            if isinstance(node, ast.Raise):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                if any(isinstance(t, str) and re.search(r"(^|\W)--[a-z]", t) for t in texts):
                    flagged.add(part)
    assert flagged - FLAGGED == set()
    assert FLAGGED - flagged == set(), "take it from the list"


def test_results_of_benchmarks_are_figures_and_not_samples():
    root = RECIPES.parent
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    listed = ["git", "-C", str(root), "ls-files", "-z", "benchmarks/results"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    sizes = [(root / name).stat().st_size for name in names.split("\0") if (root / name).is_file()]
    assert sum(sizes) <= 1.5e6


def test_a_class_name_stands_for_one_thing():
    names = [
        node.name
        for file in ROOT.rglob("*.py")
        for node in nodes(file)
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == set()
