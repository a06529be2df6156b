"""Every path that this machine runs, one after the other.

Without the package there is nothing to test here; a package that does not load is an error, not a reason to skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

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
