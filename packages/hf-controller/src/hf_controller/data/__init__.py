"""Batches between calls: expressions over results, the rows that a reader fetches, and the bytes that travel.

What lives here: everything from a future to a tensor on a rank, for any executor. What must not: knowledge of
processes, pools or groups, and imports of Ray.
"""
