"""The rooms may only look down: one table says who may import whom."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"dflash_mlx": ROOT / "dflash_mlx", **{f"dflash_mlx.{r}": ROOT / r for r in ("cli", "metal", "models")}}
FLOORS = [  # lowest first; a room may import any room on a lower floor, and none on its own
    {"types", "errors"},
    {"metal", "sampling", "folder", "hub"},
    {"rollback", "acceptance"},
    {"models"},
    {"drafter", "verifier", "text", "checkpoint", "fit"},
    {"decode"},
    {"lossless", "pairing"},
    {"loading"},
    {"catalogue", "doctor", "api"},
    {"bench"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = {"mlx": {"cli", "types", "errors"}, "typer": set(FLOOR) - {"cli"}, "rich": set(FLOOR) - {"cli"}}


def modules():
    for package, folder in ROOMS.items():
        for path in sorted(folder.rglob("*.py")):
            room = package.partition(".")[2] or path.stem
            if room not in {"__init__", "__main__"}:
                yield room, path


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room, path", list(modules()), ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_room_imports_only_lower_floors(room, path):
    assert room in FLOOR, f"{path.name}: give this room a floor"
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "dflash_mlx" and rest and rest[0] in FLOOR and rest[0] != room:
            assert FLOOR[rest[0]] < FLOOR[room], f"{path.name}: {room} may not import {rest[0]}"
        assert room not in HEAVY.get(top, set()), f"{path.name}: {room} may not import {top}"


def test_every_package_folder_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join((package, *init.parent.relative_to(folder).parts))
        for package, folder in ROOMS.items()
        for init in folder.rglob("__init__.py")
    }
    assert found == listed


def test_the_product_keeps_to_its_size():
    """Functions up to 40 lines, files up to 300, all rooms together up to 4,500."""
    total, long = 0, []
    for folder in ROOMS.values():
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.metal")]):
            text = path.read_text(encoding="utf-8")
            lines = len(text.splitlines())
            total += lines
            long += [f"{path.name}: {lines} lines"] if lines > 300 else []
            if path.suffix == ".py":
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.FunctionDef) and (n := node.end_lineno - node.lineno + 1) > 40:
                        long.append(f"{path.name}: {node.name} has {n} lines")
    assert not long and total <= 4500, (total, long)
