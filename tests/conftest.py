"""Before torch loads: idle OpenMP threads wait passively, as under the command, or they ruin a shared machine."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
