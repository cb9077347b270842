"""Batches between calls: expressions over results, the rows that a reader fetches, and the bytes that travel.

Here lives everything from a future to a tensor on a rank, for any executor; no process, pool or group is known here,
and Ray is not imported.
"""
