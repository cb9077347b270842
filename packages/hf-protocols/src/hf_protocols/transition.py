"""Costs of the train -> generate transition, by formula (paper, section 5.4 and Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import inf
from numbers import Real
from typing import Literal, get_args

from hf_protocols.errors import TopologyError
from hf_protocols.topology import Topology
from hf_protocols.validation import Checks, show

__all__ = ["Method", "TransitionCost", "compute_transition_cost"]

_check = Checks(TopologyError)

Method = Literal["hybridflow", "hybridflow-v", "ds-chat"]


@dataclass(frozen=True, kw_only=True)
class TransitionCost:
    """Bytes per rank: received, held at the peak, and held twice (on the worst rank)."""

    recv_bytes: float
    peak_param_bytes: float
    redundant_bytes: float


def compute_transition_cost(
    parameter_bytes: float, topology: Topology, method: Method = "hybridflow"
) -> TransitionCost:
    """Returns the row of Table 2 for `method`: M is `parameter_bytes`, the whole model in the weights' dtype.

    | method | received per rank | peak | redundancy |
    |---|---|---|---|
    | ds-chat | (tpd - 1) / (tpd) M | M | M / (tpd) |
    | hybridflow-v | (tp - 1) / (tp) M | M | M / (tp) |
    | hybridflow | (tp - t'p') / (t'p' tp) M | M / (t'p') | 0 |

    with t, p, d the training sizes and t', p' the generation sizes. Where t'p' = 1, hybridflow-v keeps its whole
    gather, which contains the training shard: the same volume and no redundancy. Elsewhere its redundancy is the
    paper's bound: layouts such as t' = t, p' = 1, whose vanilla groups happen to hold the
    training shards, have no redundancy.

    Raises:
        TopologyError: for an unknown method, or sizes that do not nest (`plan_transition` of hf-engine is exact
            for those).
    """
    _check.kind("topology", topology, Topology, "a Topology with a generation layout")
    if isinstance(parameter_bytes, bool) or not isinstance(parameter_bytes, Real) or not 0 <= parameter_bytes < inf:
        raise TopologyError(f"parameter_bytes={show(parameter_bytes)}. Use the bytes of the whole model, such as 14e9")
    _check.one_of("method", method, get_args(Method))
    if topology.generation is None or not topology.is_nested:
        raise TopologyError(
            "Table 2 holds for generation sizes that nest in the training sizes. Use gen_pp_size "
            f"dividing pp_size={topology.train.pp_size} and gen_tp_size dividing tp_size={topology.train.tp_size}"
        )
    train = Fraction(topology.train.pp_size * topology.train.tp_size)
    generation = Fraction(topology.generation.replica_size)
    ranks = Fraction(topology.world_size)
    received, peak, redundant = {
        "ds-chat": (1 - 1 / ranks, Fraction(1), 1 / ranks),
        "hybridflow-v": (1 - 1 / train, Fraction(1), 1 / train if generation > 1 else Fraction(0)),
        "hybridflow": (1 / generation - 1 / train, 1 / generation, Fraction(0)),
    }[method]
    return TransitionCost(
        recv_bytes=float(received * Fraction(parameter_bytes)),
        peak_param_bytes=float(peak * Fraction(parameter_bytes)),
        redundant_bytes=float(redundant * Fraction(parameter_bytes)),
    )
