"""Models of transformers as backends see them: built from a directory and written to one, tensors named as in files.

What lives here: causal language models, classifiers, stacked experts and adapters, for every backend that needs them.
What must not: sharding, optimizer steps and sampling, and what needs only the files: that is in `model_directory`.
"""
