"""This process's knowledge of its job: its place, its groups, its random numbers.

``weft.init`` makes the session and ``current.session()`` finds it. Everything above asks it for groups and ranks.
"""
