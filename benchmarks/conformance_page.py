"""The tables of docs/reference/conformance.md: what the words of `algorithm.conventions` set, and what agrees.

conformance_page.py    writes them again from results/conformance_trl.json and results/conformance_verl.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from conformance import ABSOLUTE, ROOT, STATED, find_failures
from measurement import RESULTS, record

from hf_algorithms.recipes.conventions import CONVENTIONS, RELEASES
from hf_protocols.toml import format_toml_value

PAGE = ROOT / "docs" / "reference" / "conformance.md"
_QUANTITIES = ("advantages", "returns", "loss", "gradient", "coefficient")


def publish(peer: str, found: Mapping[str, Any]) -> int:
    """Writes the result of a run and the page's tables; returns 1 where something is not as stated."""
    metrics = {name: (value, "largest difference") for name, value in found["largest"].items()}
    record(f"conformance_{peer}", metrics, versions=found["versions"])
    failures = find_failures(found["largest"], STATED[peer])
    print("\n".join(failures) or "everything is as stated")
    write_tables()
    return bool(failures)


def build_tables() -> dict[str, str]:
    """Returns every table of the page by its name, from the committed results."""
    tables = {}
    for peer, differences in STATED.items():
        path = RESULTS / f"conformance_{peer}.json"
        if path.exists():
            result = json.loads(path.read_text())
            tables[f"agreement with {peer}"] = "\n".join(_list_agreement(result, differences))
            tables[f"differences from {peer}"] = "\n".join(_list_differences(result, differences))
    for word in CONVENTIONS:
        tables[f"switches of {word}"] = "\n".join(_list_switches(word))
    return tables


def write_tables() -> None:
    """Replaces what stands between the comments `<name>` and `end of <name>` of every table."""
    text = PAGE.read_text()
    for name, table in build_tables().items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, found_start, rest = text.partition(start)
        _, found_end, after = rest.partition(end)
        assert found_start and found_end, f"{PAGE} has lost the comments of {name}"
        text = f"{before}{start}\n{table}\n\n{end}{after}"
    PAGE.write_text(text)


def _list_agreement(result: Mapping[str, Any], differences: Mapping[str, str]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in _peer_versions(result))
    yield f"Run of {result['date']} with {versions}."
    yield ""
    yield "| case | " + " | ".join(_QUANTITIES) + " |"
    yield "|---|" + "--:|" * len(_QUANTITIES)
    for case, found in _by_case(result).items():
        if case not in differences:
            yield f"| {case} | " + " | ".join(_show(found.get(name)) for name in _QUANTITIES) + " |"


def _list_differences(result: Mapping[str, Any], differences: Mapping[str, str]) -> Iterator[str]:
    yield "| case | largest difference | why |"
    yield "|---|--:|---|"
    cases = _by_case(result)
    for case, why in differences.items():
        yield f"| {case} | {max(cases[case].values()):.2g} | {why} |"


def _list_switches(word: str) -> Iterator[str]:
    yield f"{RELEASES[word]}:"
    yield ""
    yield "| algorithm | keys |"
    yield "|---|---|"
    for algorithm, table in CONVENTIONS[word].items():
        keys = (f"`{key} = {'none' if value is None else format_toml_value(value)}`" for key, value in table.items())
        yield f"| `{algorithm}` | {', '.join(keys)} |"


def _by_case(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    cases: dict[str, dict[str, float]] = {}
    for name, metric in result["metrics"].items():
        case, _, quantity = name.rpartition("/")
        cases.setdefault(case, {})[quantity] = metric["value"]
    return cases


def _peer_versions(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = ("trl", "trl (PPO)", "verl", "torch", "transformers", "accelerate", "tensordict")
    peer = result["subject"].removeprefix("conformance_")
    asked = {
        "trl": ("trl", "trl (PPO)", "torch", "transformers", "accelerate"),
        "verl": ("verl", "torch", "tensordict"),
    }[peer]
    yield from ((name, result["versions"][name]) for name in names if name in asked)


def _show(value: float | None) -> str:
    if value is None:
        return ""
    assert value <= ABSOLUTE
    return "0" if value == 0 else f"{value:.0e}"


if __name__ == "__main__":
    write_tables()
    sys.exit(0)
