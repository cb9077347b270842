"""From a dataflow to a plan: what each model asks for, its layouts, its pools, and the exact search over placements.

What lives here: every decision between layouts or placements. What must not: simulators, which are only called here,
and printing. `exact_search` is the entry; `simulation` prices one given placement with the same parts.
"""
