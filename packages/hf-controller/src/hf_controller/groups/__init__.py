"""Workers and their groups: pools, roles, process groups, and the messages that a call on a group becomes.

Here lives what a program sees of its workers, and what joins their ranks. No rank is started here and no message is
sent: `executors` do that.
"""
