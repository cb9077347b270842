"""Generation: prompts, sampling, responses and replicas, the same for every rollout backend, and the backends.

What lives here: what engines share, and `transformers/`, `vllm/`, `sglang/` and `server/`, one folder for each backend.
What must not: training, and an import of an engine's library outside the folder of its backend.
"""
