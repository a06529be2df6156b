"""Before torch loads: idle OpenMP threads wait passively, as under the command, or they ruin a shared machine."""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts what it puts into the background with Ctrl-C ignored, and all its children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings

# Durations of a shared machine mean nothing; pytest's own timeout ends what hangs.
settings.register_profile("untimed", deadline=None, print_blob=True)
settings.load_profile("untimed")
