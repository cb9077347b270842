"""From a dataflow to a plan: what each model asks for, its layouts, its pools, and the exact search over placements.

Here lives all that decides between layouts or placements; simulators are asked, never written here, and nothing prints.
`exact_search` is the entry; `simulation` prices one given placement with the same parts.
"""
