"""The start-up proof: each library product keeps the row law on the shapes of this model, on this machine, now.

What is built from exactly rounded operations keeps the law by construction; batched matrix products, ``cumsum`` and
``searchsorted`` are the library's own, and a library may choose its path by shape, count or thread. A run is refused
where it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.errors import NotHeldError
from zerogap.ops.portable.attention import KEY_BLOCK, QUERY_TILE
from zerogap.ops.portable.linear import OUTPUT_MULTIPLE, TILE

_BATCHES = (1, 2, 3)


@dataclass(frozen=True)
class ProductShape:
    """A product [rows, inner] x [inner, columns] that some op makes.

    Attributes:
        stride: elements from one row to the next; above ``inner`` where an op cuts its inner dimension.
        shared: all tiles share the right factor.
        transposed: the right factor is stored by columns, as weights and keys are.
    """

    op: str
    rows: int
    inner: int
    columns: int
    stride: int
    shared: bool
    transposed: bool = True


def linear_shape(op: str, in_features: int, out_features: int, segments: int = 1) -> ProductShape:
    """Return the product that ``linear`` makes of a layer."""
    columns = -(-out_features // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
    return ProductShape(op, TILE, in_features // segments, columns, in_features, shared=True)


def attention_shapes(heads: int, kv_heads: int, head_dim: int) -> tuple[ProductShape, ProductShape]:
    """Return the two products that ``attention`` makes."""
    rows = QUERY_TILE * (heads // kv_heads)
    return (
        ProductShape("attention scores", rows, head_dim, KEY_BLOCK, head_dim, shared=False),
        ProductShape("attention values", rows, KEY_BLOCK, head_dim, KEY_BLOCK, shared=False, transposed=False),
    )


def prove_products(shapes: set[ProductShape], dtype: torch.dtype) -> None:
    """Prove that rows of each product are blind to their place, their neighbours and the number of tiles.

    Raises:
        NotHeldError: one is not; it names the op, the shape and what broke it.
    """
    for shape in sorted(shapes, key=lambda s: (s.op, s.rows, s.inner, s.columns)):
        for what in broken_laws(shape, dtype):
            size = f"[{shape.rows}, {shape.inner}] x [{shape.inner}, {shape.columns}]"
            raise NotHeldError(
                f"{shape.op}: this machine's library product {size} breaks the row law ({what}) at "
                f"{torch.get_num_threads()} threads, so the gap would not be 0; "
                "try another OMP_NUM_THREADS or torch build"
            )


Product = Callable[[Tensor, Tensor], Tensor]


def broken_laws(shape: ProductShape, dtype: torch.dtype, product: Product = torch.bmm) -> Iterator[str]:
    """Yield what breaks the row law in ``product`` at ``shape``: nothing, if it holds."""
    generator = torch.Generator().manual_seed(20240229)
    cut = shape.stride - shape.inner
    a_BMK = torch.randn(max(_BATCHES), shape.rows, shape.stride, generator=generator).to(dtype)[..., cut:]
    b_BNK = torch.randn(1 if shape.shared else max(_BATCHES), shape.columns, shape.stride, generator=generator)
    b_BKN = b_BNK.to(dtype)[..., cut:].transpose(1, 2).expand(max(_BATCHES), -1, -1)
    if not shape.transposed:
        b_BKN = b_BKN.contiguous()
    alone = torch.cat([product(a_BMK[i : i + 1], b_BKN[i : i + 1]) for i in range(max(_BATCHES))])

    def laid(rows_BMK: Tensor) -> Tensor:
        """Give rows the stride that the op has."""
        return torch.nn.functional.pad(rows_BMK, (cut, 0))[..., cut:]

    for batch in _BATCHES:
        if not _same(product(a_BMK[:batch], b_BKN[:batch]), alone[:batch]):
            yield f"{batch} tiles at once differ from one alone"
    for shift in range(1, shape.rows, max(1, shape.rows // 3)):
        if not _same(product(laid(a_BMK.roll(shift, 1)), b_BKN), alone.roll(shift, 1)):
            yield f"rows moved down by {shift}"
    if not _same(product(laid(a_BMK.flip(1)), b_BKN), alone.flip(1)):
        yield "rows in reverse order"
    lonely = torch.zeros_like(a_BMK)
    lonely[:, 0] = a_BMK[:, -1]
    if not _same(product(laid(lonely), b_BKN)[:, 0], alone[:, -1]):
        yield "a row among zeros"
    loud = a_BMK.clone()
    loud[:, 1::2] = torch.finfo(dtype).max / 4
    if not _same(product(laid(loud), b_BKN)[:, 0], alone[:, 0]):
        yield "a row beside extreme values"


def prove_scans(vocabulary: int) -> None:
    """Prove that the sampler's running sums of a row are blind to other rows.

    Raises:
        NotHeldError: they are not.
    """
    generator = torch.Generator().manual_seed(20240229)
    weights_RV = torch.rand(5, vocabulary, generator=generator, dtype=torch.float64)
    together = weights_RV.cumsum(1)
    for row in range(5):
        alone = weights_RV[row : row + 1].cumsum(1)
        aim = alone[:, -1:] * 0.37
        found = torch.searchsorted(together, (together[:, -1:] * 0.37), right=True)[row]
        if not _same(alone[0], together[row]) or found != torch.searchsorted(alone, aim, right=True)[0]:
            raise NotHeldError(
                f"sampling: this machine's cumsum over {vocabulary} tokens breaks the row law at "
                f"{torch.get_num_threads()} threads; try another OMP_NUM_THREADS or torch build"
            )


def _same(first: Tensor, second: Tensor) -> bool:
    integer = torch.int32 if first.dtype == torch.float32 else torch.int64
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))
