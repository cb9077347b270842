"""Parts of tests and benchmarks of hf-engine that no wheel has.

What lives here: engines and servers that tests share, checks of several engines, counters of bytes, small weights.
What must not: what a user's own backend is tested with; that is in `hf_engine.testing`.
"""
