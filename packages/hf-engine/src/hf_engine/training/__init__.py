"""What belongs to training and not to one backend: `state` saves and restores it.

Passes, losses and optimizers are in `backends`; no weights move between ranks here.
"""
