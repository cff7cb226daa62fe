"""The rooms may only look down: one table says who may import whom."""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = {"dflash_mlx": ROOT / "dflash_mlx", **{f"dflash_mlx.{r}": ROOT / r for r in ("cli", "metal", "models")}}
FLOORS = [  # lowest first; a room may import any room on a lower floor, and none on its own
    {"errors"},
    {"types"},
    {"metal", "sampling", "processors"},
    {"rollback", "acceptance"},
    {"models"},
    {"drafter", "verifier", "text", "folder", "hub", "fit", "ngram"},
    {"decode", "checkpoint"},
    {"lossless", "pairing"},
    {"catalogue", "doctor"},
    {"loading"},
    {"api"},
    {"bench", "assistant"},
    {"cli"},
]
BUDGETS = {  # lines of code that each part of the product may have
    "engine, models, metal, cli": (4500, ["dflash_mlx", "dflash_mlx.models", "dflash_mlx.metal", "dflash_mlx.cli"]),
    "bench": (1000, ["dflash_mlx.bench"]),
    "assistant": (1600, ["dflash_mlx.assistant", "dflash_mlx.cli.repl"]),
}
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
HEAVY = {"mlx": {"cli", "types", "errors"}, "typer": set(FLOOR) - {"cli"}, "rich": set(FLOOR) - {"cli"}}


def packages():
    """Yield every package's name and folder."""
    for top, folder in TOP.items():
        for init in sorted(folder.rglob("__init__.py")):
            yield ".".join((top, *init.parent.relative_to(folder).parts)), init.parent


def modules():
    for package, folder in packages():
        for path in sorted(folder.glob("*.py")):
            room = package.split(".")[1] if "." in package else path.stem
            if "." in package or room not in {"__init__", "__main__"}:
                yield room, path


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "room, path", list(modules()), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_a_room_imports_only_lower_floors(room, path):
    assert room in FLOOR, f"{path.name}: give this room a floor"
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "dflash_mlx" and rest and rest[0] in FLOOR and rest[0] != room:
            assert FLOOR[rest[0]] < FLOOR[room], f"{path.name}: {room} may not import {rest[0]}"
        assert room not in HEAVY.get(top, set()), f"{path.name}: {room} may not import {top}"


def test_every_package_folder_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {package for package, _ in packages()}
    assert found == listed


def code_lines(path: Path) -> int:
    """Count lines that hold code: no blanks, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".metal":
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())
    held = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for number in range(token.start[0], token.end[0] + 1)
    }
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    docs = [node.body[0] for node in nodes if node.body and ast.get_docstring(node, clean=False) is not None]
    return len(held - {number for doc in docs for number in range(doc.lineno, doc.end_lineno + 1)})


def sources(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.py"), *folder.glob("*.metal")])


@pytest.mark.parametrize("part", BUDGETS)
def test_each_part_keeps_to_its_size(part):
    limit, names = BUDGETS[part]
    folders = dict(packages())
    total = sum(code_lines(path) for name in names for path in sources(folders[name]))
    assert total <= limit, f"{part}: {total} lines of code, {limit} allowed"


def test_every_package_has_a_budget():
    assert sorted(name for _, names in BUDGETS.values() for name in names) == sorted(name for name, _ in packages())


@pytest.mark.parametrize("path", [path for _, folder in packages() for path in sources(folder)], ids=lambda p: p.name)
def test_functions_and_files_keep_to_their_size(path):
    """Functions have up to 40 lines, files up to 300."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, f"{path.name}: {node.name} is too long"
