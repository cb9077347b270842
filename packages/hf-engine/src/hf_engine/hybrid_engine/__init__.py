"""Moving weights between training and generation: colocated in `hybrid_engine` and general in `weight_sync`.

What lives here: pairing two backends, entering and leaving generation, versions, checks of what an engine generates.
What must not: arithmetic of boxes, which is in `resharding`, and anything that knows one backend or its library.
"""
