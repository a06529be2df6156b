"""Every path that this machine runs, one after the other.

Without the package there is nothing to test here; a package that does not load is an error, not a reason to skip.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# A shell starts what it puts into the background with Ctrl-C ignored, and all its children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("zerogap_kernels"):
    import zerogap_kernels as kernels

    @pytest.fixture(params=kernels.paths_here())
    def path(request: pytest.FixtureRequest) -> Iterator[str]:
        """Run the test on one path; the one in use comes back."""
        before = kernels.path()
        kernels.choose_path(request.param)
        yield request.param
        kernels.choose_path(before)

else:
    collect_ignore_glob = ["test_*.py"]
