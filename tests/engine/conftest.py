import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """The small models here gain nothing from threads, and a busy machine loses much; conformance tests draw them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
