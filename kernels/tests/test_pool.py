"""Memory of tensors that live for a part of a step: a block serves again, and no more stays mapped than was in use."""

import gc
import os
import subprocess
import sys
import threading

import pytest

import zerogap_kernels as kernels

torch = pytest.importorskip("torch")
from torch.utils.dlpack import from_dlpack  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_idle() -> None:
    gc.collect()
    kernels.trim_pool()


def tensor(*shape: int) -> "torch.Tensor":
    return from_dlpack(kernels.empty(list(shape)))


def used() -> int:
    return kernels.pool_bytes()[0]


def test_a_tensor_is_float32_contiguous_aligned_and_writable() -> None:
    x = tensor(3, 1000, 7)
    assert (x.dtype, x.shape, x.stride()) == (torch.float32, (3, 1000, 7), (7000, 7, 1))
    assert x.data_ptr() % 4096 == 0
    x.copy_(torch.arange(21000.0).view(3, 1000, 7))
    assert x[2, 999, 6] == 20999
    assert x.requires_grad_().sum().backward() is None


def test_views_keep_a_block_and_the_next_of_its_size_gets_it() -> None:
    before = used()
    x = tensor(512, 1024)
    place, part = x.data_ptr(), x[3:5]
    del x
    assert used() > before
    del part
    assert used() == before
    assert tensor(500, 1024).data_ptr() == place
    assert tensor(100, 1024).data_ptr() != place


def test_a_capsule_that_nobody_takes_gives_its_block_back() -> None:
    before = used()
    kernels.empty([1024, 1024])
    assert used() == before


OTHER_SIZES = """
import zerogap_kernels as kernels
for megabytes in (8, 5, 9, 4, 11, 3, 12):
    kernels.empty([megabytes, 1 << 18])  # nobody takes it: idle at once
used, idle = kernels.pool_bytes()
assert used == 0 and 12 << 20 <= idle <= 13 << 20, (used, idle)
kernels.trim_pool()
assert kernels.pool_bytes() == (0, 0)
"""


def test_other_sizes_do_not_pile_up() -> None:
    """In a process of its own: how much may be idle depends on the most that was ever in use."""
    done = subprocess.run([sys.executable, "-c", OTHER_SIZES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [[], [0], [0, 5], [3, 0]])
def test_small_and_empty_shapes(shape: list[int]) -> None:
    assert list(tensor(*shape).shape) == shape


@pytest.mark.parametrize("shape", [[-1], [2, -3], [1 << 40, 1 << 40]])
def test_impossible_shapes_are_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="negative or too large"):
        kernels.empty(shape)


def test_more_than_the_machine_has_is_a_memory_error() -> None:
    before = used()
    with pytest.raises(MemoryError):
        kernels.empty([1 << 46])
    assert used() == before


def test_threads_and_forks() -> None:
    before, wrong = used(), []

    def work(value: float) -> None:
        for step in range(200):
            x = tensor(64 + step % 5, 4096).fill_(value)
            if not bool((x == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if list(tensor(64, 4096).shape) == [64, 4096] else 1)
    for thread in threads:
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not wrong
    assert used() == before
