"""What the launcher and the processes that it starts have to agree on."""

import errno
import socket

WAITED = 76  # of one that has waited in vain for another; EX_PROTOCOL there
FOR_ANOTHER = 75  # the exit code of a process that ends because another has failed; EX_TEMPFAIL of sysexits.h


def is_taken(port: int) -> bool:
    """Returns True if another program has this port, so that process 0 cannot listen there."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended are fine
                probe.bind((host, port))
            return False
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            # else there is no IPv6 here, or JAX says what is wrong
    return False
