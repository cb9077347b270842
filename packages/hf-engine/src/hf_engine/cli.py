"""The `hf-engine` command: what a transition costs before anything runs, and a proof of it on real weights."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from hf_protocols.errors import ConfigError, HybridFlowError, ReshardError, TopologyError
from hf_protocols.models import ModelShape
from hf_protocols.paths import read_path
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology
from hf_protocols.transition import Method
from hf_protocols.validation import show

__all__ = ["main"]

Spec = TypeVar("Spec", ParallelSpec, GenerationSpec)

_FIGURES = ("received", "worst", "peak", "redundant")
_MAX_RANKS = 16_384
"""A plan lists every rank's messages; seconds become minutes above."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; a user's mistake is one line on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options), flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has enough; what is still buffered goes nowhere on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (HybridFlowError, OSError) as error:
        print(f"hf-engine {options.command}: {error}", file=sys.stderr)
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with arguments in one line, as everything else does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` shows the options\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hf-engine", description="Plans the transition of a model's weights from training to generation."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="bytes and memory of a transition, by method")
    plan.add_argument("--method", choices=get_args(Method), help="one method only; all three by default")
    plan.add_argument("--dtype-bytes", type=int, default=2, choices=(2, 4, 8), help="bytes of one weight (default 2)")
    plan.add_argument(
        "--ranks-per-machine",
        type=int,
        default=8,
        help="ranks per machine; receivers prefer senders on their own (default 8)",
    )
    plan.set_defaults(run=_plan)
    check = commands.add_parser("check", help="prove a conversion on real weights, there and back, bit for bit")
    check.set_defaults(run=_check)
    for command in (plan, check):
        what = "preset, config.json or directory" if command is plan else "directory in Hugging Face format"
        command.add_argument("--model", required=True, help=what)
        command.add_argument("--train", required=True, help="training sizes pp-tp-dp, such as 1-8-2")
        command.add_argument("--cp-size", type=int, default=1, help="context-parallel ranks, on top of --train")
        command.add_argument("--ep-size", type=int, default=1, help="expert-parallel ranks, which divide dp * cp")
        command.add_argument("--gen", required=True, help="generation sizes pp-tp, such as 1-2")
        command.add_argument("--sharding", default="megatron", choices=("megatron", "fsdp"), help="default megatron")
        command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def _topology(options: argparse.Namespace) -> Topology:
    train = replace(_sizes("--train", ParallelSpec, options.train), cp_size=options.cp_size, ep_size=options.ep_size)
    topology = Topology(train, _sizes("--gen", GenerationSpec, options.gen))
    if topology.world_size > _MAX_RANKS:
        raise TopologyError(
            f"--train {options.train} has {topology.world_size} ranks: plans are made for up to {_MAX_RANKS} of them"
        )
    return topology


def _sizes(flag: str, spec: type[Spec], text: str) -> Spec:
    try:
        return spec.parse(text)
    except TopologyError as error:
        raise TopologyError(f"{flag}: {error}") from None


def _plan(options: argparse.Namespace) -> str:
    topology = _topology(options)
    model = _model_shape(options.model)
    rows: dict[str, dict[str, Any]] = {}
    for method in [options.method] if options.method else get_args(Method):
        try:
            rows[method] = _costs(model, topology, method, options)
        except ReshardError as error:
            if options.method:
                raise
            rows[method] = {"refused": str(error)}
    if all("refused" in row for row in rows.values()):
        raise ReshardError(_refusal({method: row["refused"] for method, row in rows.items()}))
    facts = {"model": model.name, "train": options.train, "gen": options.gen, "ranks": topology.world_size}
    facts |= {"cp_size": options.cp_size, "ep_size": options.ep_size}
    facts["parameter_bytes"] = model.num_parameters * options.dtype_bytes
    if options.json:
        return json.dumps(facts | {"methods": rows}, indent=2)
    return _table(facts, rows)


def _costs(model: ModelShape, topology: Topology, method: Method, options: argparse.Namespace) -> dict[str, Any]:
    from hf_engine.resharding.transition import plan_transition

    planned = plan_transition(
        model,
        topology,
        method,
        dtype_bytes=options.dtype_bytes,
        sharding=options.sharding,
        ranks_per_machine=options.ranks_per_machine,
    )
    by_rank = {
        "recv_bytes": planned.recv_bytes,
        "send_bytes": planned.send_bytes,
        "kept_bytes": planned.kept_bytes,
        "peak_param_bytes": planned.peak_param_bytes,
    }
    exchanges = [vars(exchange) | {"ranks": list(exchange.ranks)} for exchange in planned.exchanges]
    return {
        **{name: {"mean": sum(d.values()) / len(d), "worst": max(d.values())} for name, d in by_rank.items()},
        "redundant_bytes": planned.redundant_bytes,
        "by_rank": {name: [values[rank] for rank in planned.plan.ranks] for name, values in by_rank.items()},
        "exchanges": exchanges,
    }


def _table(facts: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        f"{facts['model']}: {_size(facts['parameter_bytes'])} of weights on {facts['ranks']} ranks",
        f"training {facts['train']} (pp-tp-dp{_others(facts)}), generation {facts['gen']} (pp-tp)",
        "",
    ]
    # What a terminal has no room for goes, the last first; in a pipe there is room for everything.
    room = shutil.get_terminal_size((10_000, 24)).columns - 14
    headings = _FIGURES[: max(1, room // 12)]
    exchanges = max(len(_exchanges(row["exchanges"])) for row in rows.values() if "refused" not in row)
    has_exchanges = room >= 12 * len(_FIGURES) + 2 + exchanges
    lines.append("".join([f"{'per rank':<14}", *(f"{name:>12}" for name in headings), "  exchanges" * has_exchanges]))
    for method, row in rows.items():
        if "refused" in row:
            lines.append(f"{method:<14}not defined here: {row['refused']}")
            continue
        figures = (
            row["recv_bytes"]["mean"],
            row["recv_bytes"]["worst"],
            row["peak_param_bytes"]["worst"],
            row["redundant_bytes"],
        )
        cells = "".join(f"{_size(value):>12}" for value in figures[: len(headings)])
        lines.append(f"{method:<14}{cells}" + f"  {_exchanges(row['exchanges'])}" * has_exchanges)
    lines += ["", "received: mean over ranks; peak and redundancy: the worst rank"]
    if left_out := [*_FIGURES[len(headings) :], *["exchanges"] * (not has_exchanges)]:
        lines.append(f"left out at this width: {', '.join(left_out)}")
    return "\n".join(lines)


def _refusal(reasons: Mapping[str, str]) -> str:
    """One reason for all methods is the layout's; else what one method advises need not do for another."""
    alike: dict[str, list[str]] = {}
    for method, reason in reasons.items():
        alike.setdefault(reason, []).append(method)
    if len(alike) == 1:
        return next(iter(alike))
    return "no method is defined here: " + "; ".join(f"{', '.join(names)}: {why}" for why, names in alike.items())


def _others(facts: Mapping[str, Any]) -> str:
    """The sizes that --train does not hold, where there are any."""
    return "".join(f", {name[:2]} {facts[name]}" for name in ("cp_size", "ep_size") if facts[name] > 1)


def _exchanges(exchanges: Sequence[Mapping[str, Any]]) -> str:
    if not exchanges:
        return "none: every rank holds what it needs"
    sizes = sorted({len(exchange["ranks"]) for exchange in exchanges})
    kind = "all-gather" if not any(exchange["peer_bytes"] for exchange in exchanges) else "all-gather, point to point"
    if not any(exchange["gather_bytes"] for exchange in exchanges):
        kind = "point to point"
    groups = "1 group" if len(exchanges) == 1 else f"{len(exchanges)} groups"
    return f"{kind} in {groups} of {', '.join(map(str, sizes))} ranks"


def _check(options: argparse.Namespace) -> str:
    from hf_engine.model_directory import check_model_directory, find_base, read_model_directory
    from hf_engine.resharding.checking import check_conversion
    from hf_engine.resharding.model_layouts import generation_layout
    from hf_engine.resharding.transition import training_layout

    topology = _topology(options)
    label = f"--model {show(options.model)}"
    files = read_model_directory(find_base(read_path("--model", options.model), label=label), label=label)
    check_model_directory(files)
    model, directory = files.require_shape(), files.path
    source = training_layout(model, topology, options.sharding)
    report = check_conversion(directory, source, generation_layout(model, topology))
    if options.json:
        return json.dumps(vars(report) | {"digests": {n: f"{d:016x}" for n, d in report.digests.items()}}, indent=2)
    return (
        f"{report.num_parameters} parameters, {_size(report.parameter_bytes)}: training {options.train} -> generation "
        f"{options.gen} -> training is bit-exact on all {topology.world_size} ranks; {_size(report.moved_bytes)} moved"
    )


def _model_shape(name: str) -> ModelShape:
    path = Path(read_path("--model", name))
    if path.is_dir():
        from hf_engine.model_directory import check_model_directory, find_base, read_model_directory

        label = f"--model {show(name)}"
        files = read_model_directory(find_base(path, label=label), label=label, needs_weights=False)
        check_model_directory(files)
        return files.require_shape()
    if path.exists():
        return ModelShape.from_config(path)
    if "/" in name or name.startswith(("~", ".")):
        raise ConfigError(
            f"--model {show(name)}: no such file or directory. Give a model directory, or a preset's name"
        )
    try:
        return ModelShape.preset(name)
    except ConfigError as error:
        raise ConfigError(f"--model {show(name)} is not a file or directory, and as a preset: {error}") from None


def _size(num_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


if __name__ == "__main__":
    main()
