"""Workers and their groups: pools, roles, process groups, and the messages that a call on a group becomes.

What lives here: the workers as a program sees them, and what joins their ranks. What must not: starting ranks and
sending messages, which `executors` do.
"""
