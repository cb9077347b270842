"""Model directories of a run: what each role starts from, its adapters, and what is exported.

What lives here: reading or making the initial model, finding the model of a command, adapters, and exports.
What must not: tensors of a model in use, which belong to `hf_engine` and to `workers`.
"""
