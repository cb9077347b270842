"""What a run needs to go on: its ledger of samples.

Weights and optimizers belong to the workers, files to `run_directory`.
"""

from __future__ import annotations

from hf_algorithms.checkpoints.ledger import LEDGER, Ledger, LedgerError, count_ledger

__all__ = ["LEDGER", "Ledger", "LedgerError", "count_ledger"]
