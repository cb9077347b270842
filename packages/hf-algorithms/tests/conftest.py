from __future__ import annotations

import torch

# As on a rank: threads that wait for each other take the cores from the other part of `make test`.
torch.set_num_threads(1)
