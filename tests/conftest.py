"""Before torch loads: idle OpenMP threads wait passively, as under the command, or they ruin a shared machine."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import settings

# Durations of a shared machine mean nothing; pytest's own timeout ends what hangs.
settings.register_profile("untimed", deadline=None, print_blob=True)
settings.load_profile("untimed")
