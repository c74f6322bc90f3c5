"""What the launcher and the processes that it starts have to agree on."""

FOR_ANOTHER = 75  # the exit code of a process that ends because another has failed; EX_TEMPFAIL of sysexits.h
