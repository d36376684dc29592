"""Expert parallelism over data-parallel replicas: each has some of the experts, and tokens travel to theirs and back.

    rows of this replica -- all-to-all --> rows for this rank's experts --> their code -- all-to-all --> sums by row

Rows go to a rank once, however many of its experts they have chosen. The module's own code runs on what has come, on
this rank's weights. ``find`` tries that with made-up weights; ``apply`` puts it into effect. The layout is that of
GShard (Lepikhin et al., arXiv 2006.16668); see ``docs/design/experts.md``.
"""
