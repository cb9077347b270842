"""scripts/house_numbers.py counts what is there, in the same order each time."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = "an" + "ew"  # in two parts: this file is free of it, too
BASE = '''"""Bases,
in two lines."""

# why
class Base:
    def run(self) -> int:
        from one.user import use

        try:
            return use()
        except (KeyError, Exception):
            raise
        except BaseException:  # noqa: BLE001
            assert True
'''
FILES = {
    "src/one/__init__.py": 'from one.base import Base\n\n__all__ = ["Base"]\n',
    "src/one/base.py": BASE,
    "src/one/user.py": "from one import Base\nfrom one import leaf\n\n\ndef use():\n    return Base, leaf\n",
    "src/one/leaf.py": "class Base:\n    pass\n\n\nwith suppress(KeyError, Exception):\n    pass\n",
    "src/one/recipes/__init__.py": "from one.recipes import ppo\n",
    "src/one/recipes/ppo.py": "import one.base\n",
    "tests/test_one.py": f"def test_{'x' * 56}() -> None: ...\n\n\ndef test_short() -> None: ...  # {FORBIDDEN}\n",
}


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "house_numbers.py"))


@pytest.fixture
def house(numbers: dict[str, Any], tmp_path: Path) -> Any:
    for name, source in FILES.items():
        path = tmp_path / "packages" / "hf-engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return numbers["read_house"](tmp_path)


def test_numbers_imports_are_followed_through_folders(house: Any) -> None:
    user = house.modules["one.user"]
    assert house.imports(user, lazy=False) == {"one.base", "one.leaf"}
    base = house.modules["one.base"]
    assert (house.imports(base, lazy=False), house.imports(base, lazy=True)) == (set(), {"one.user"})


def test_numbers_list_every_finding(numbers: dict[str, Any], house: Any) -> None:
    assert list(numbers["list_findings"](house)) == [
        "cycle: one one.base one.user",
        "one importer: one.leaf <- one.user",
        "one importer: one.user <- one.base",
        "two meanings: Base: one.base one.leaf",
        "broad except: packages/hf-engine/src/one/base.py:11",
        "broad except: packages/hf-engine/src/one/base.py:13",
        "broad except: packages/hf-engine/src/one/leaf.py:5",
    ]


def test_numbers_tables_count_each_package_and_all(numbers: dict[str, Any], house: Any) -> None:
    tables = numbers["build_tables"](house).splitlines()
    rows = {cells[1]: cells[2:-1] for line in tables if (cells := [cell.strip() for cell in line.split("|")])[1:]}
    assert rows["hf-engine"][:2] == rows["**all**"][:2] == ["6", "31"]
    assert rows["hf-engine"][4:] == ["6.5 %", "3.2 %", "0.13"]
    assert rows["in hf-engine"] == ["`recipes` 2"]
    assert {name: counts[-1] for name, counts in rows.items() if counts[-1].isdigit()} == {
        "import cycles at module level": "0",
        "import cycles, lazy and type imports counted": "1",
        "modules with one importer": "2",
        "class names with two meanings": "1",
        "exported names": "1",
        "broad `except`": "3",
        "imports inside functions": "1",
        "functions without a return type": "1",
        "`raise` statements": "1",
        "`assert` statements": "1",
        "`noqa` and `type: ignore`": "1",
        "test functions": "2",
        "test names over 60 characters": "1",
        "forbidden expressions, tests included": "1",
    }
    assert tables == numbers["build_tables"](house).splitlines()


def test_numbers_cycles_are_the_connected_components(numbers: dict[str, Any]) -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "f"}}
    assert numbers["find_cycles"](edges) == [["a", "b", "c"], ["d", "e"]]


def test_numbers_find_no_circle_in_the_house(numbers: dict[str, Any]) -> None:
    """Imports inside functions, imports for types and names that a folder passes on count, too."""
    assert numbers["read_house"]().find_circles(lazy=True) == []


def test_numbers_page_has_the_scripts_tables_between_its_markers(numbers: dict[str, Any]) -> None:
    _, begin, rest = numbers["PAGE"].read_text().partition(numbers["BEGIN"])
    tables, end, _ = rest.partition(numbers["END"])
    assert begin and end
    rows = [line.split("|")[1].strip() for line in tables.splitlines() if line.startswith("|")]
    assert {*numbers["PACKAGES"], "**all**", "broad `except`"} <= set(rows), "run scripts/house_numbers.py"
