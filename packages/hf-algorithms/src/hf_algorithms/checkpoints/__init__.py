"""State with which a run goes on: commits of all roles and of the program, the ledger of samples, and resuming.

`commit` is one step on disk, `program` what the program itself keeps, `origin` what a run was started with. `saver`
says when a run that goes on commits and which commits it keeps, `pending_step` is a commit that a thread writes, and
`resume` reads one.
What must not live here: tensors, which belong to the workers, and files that grow, which belong to `run_directory`.
"""

from __future__ import annotations

from hf_algorithms.checkpoints.commit import CheckpointError, Commit, find_commits, find_last_commit
from hf_algorithms.checkpoints.ledger import LEDGER, Ledger, LedgerError, count_ledger
from hf_algorithms.checkpoints.program import refuse_unkept
from hf_algorithms.checkpoints.resume import Resumption, open_resumption
from hf_algorithms.checkpoints.saver import Checkpoints

__all__ = [
    "LEDGER",
    "CheckpointError",
    "Checkpoints",
    "Commit",
    "Ledger",
    "LedgerError",
    "Resumption",
    "count_ledger",
    "find_commits",
    "find_last_commit",
    "open_resumption",
    "refuse_unkept",
]
