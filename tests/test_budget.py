"""Every room of the package stays below its ceiling of lines (tests/budget.toml), and the number of guards stays low."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rstar_lab"
BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())
ROOMS = BUDGET["core_rooms"] | BUDGET["ring_rooms"]


def files(folder: Path) -> list[Path]:
    return [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py"))


def line_count(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def room_files(name: str) -> list[Path]:
    """Return the files of a room. A file that another room names itself belongs to that room."""
    own = ROOMS[name]["paths"]
    other = {PACKAGE / path for room in ROOMS if room != name for path in ROOMS[room]["paths"] if path.count("/")}
    found = [path for place in own for path in files(PACKAGE / place) if (PACKAGE / place).exists()]
    return [
        path for path in found if not any(path == at or at in path.parents for at in other - {PACKAGE / p for p in own})
    ]


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_stays_below_its_ceiling(name: str) -> None:
    assert line_count(room_files(name)) <= ROOMS[name]["ceiling"]


def test_every_file_of_the_package_belongs_to_one_room() -> None:
    counted = [path for name in ROOMS for path in room_files(name)]
    assert sorted(counted) == files(PACKAGE)


def test_package_core_and_tests_stay_below_their_ceilings() -> None:
    core = [path for name in BUDGET["core_rooms"] for path in room_files(name)]
    assert line_count(files(PACKAGE)) <= BUDGET["package"]
    assert line_count(core) <= BUDGET["core"]
    assert line_count(files(ROOT / "tests")) <= BUDGET["tests"]


def test_guards_stay_rare() -> None:
    """Counts `except` per 1,000 code lines (lines that hold a token of a statement, no comments and docstrings)."""
    excepts = lines = 0
    for path in files(PACKAGE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, node.end_lineno + 1)  # type: ignore[operator]
        }
        code = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines += sum(bool(line) and not line.startswith("#") for n, line in enumerate(code, 1) if n not in docstrings)
        excepts += sum(isinstance(node, ast.ExceptHandler) for node in ast.walk(tree))
    assert 1000 * excepts / lines <= BUDGET["excepts_per_1000_lines"], f"{excepts} in {lines} lines"


if __name__ == "__main__":
    for name in ROOMS:
        print(f"{name:32}{line_count(room_files(name)):8,}{ROOMS[name]['ceiling']:8,}")
    print(f"{'package':32}{line_count(files(PACKAGE)):8,}   tests {line_count(files(ROOT / 'tests')):,}")
