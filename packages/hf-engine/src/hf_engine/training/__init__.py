"""Parts that training backends share: an optimizer step and its two halves in `steps`, saving and restoring in `state`.

Weights, layouts and collectives of a library live with its backend in `backends`; generation never lives here.
"""
