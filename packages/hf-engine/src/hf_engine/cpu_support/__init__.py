"""Stand-ins that let libraries made for GPUs run on a CPU, each for one version: `test_cpu_support.py` names them.

What lives here: import hooks, platform plugins, a worker, replaced functions, and a stand-in for torchvision.
What must not: anything that runs where there is a GPU, and anything a backend needs apart from its library.
"""
