"""Training: an optimizer step and its parts, the same for every training backend, and the backends themselves.

What lives here: steps, losses, micro-batches, optimizers and states on disk; `fsdp/` and `megatron/` are the backends.
What must not: generation, and a library's own weights, layouts and collectives outside the folder of its backend.
"""
