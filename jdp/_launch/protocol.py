"""What the launcher and the processes that it starts have to agree on."""

WAITED = 76  # of one that has waited in vain for another; EX_PROTOCOL there
FOR_ANOTHER = 75  # the exit code of a process that ends because another has failed; EX_TEMPFAIL of sysexits.h
