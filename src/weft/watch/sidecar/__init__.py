"""A small process beside each rank of a job over several hosts, for what no rank can do.

    a rank that has ended      does not see that Open MPI's mpirun, or its daemon on this host, stays: with the link to
                               another host cut, it waits there for words that nobody hears, for minutes
    a rank that stands still   does not see that all others have ended because of that; alone on its host it would stay

start    a rank starts the process, and dismisses it when all ranks have come to their end
program  the process: what it looks at, and whom it ends when
"""
