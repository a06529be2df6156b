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

_BATCHES = (1, 2, 3, 9)  # fewer tiles than threads, and more
_TILES = 3  # whose rows are moved about


@dataclass(frozen=True)
class ProductShape:
    """A product [rows, inner] x [inner, columns] that some op makes.

    Attributes:
        shared: all tiles share the right factor.
        transposed: the right factor lies in memory as [columns, inner].
        stride: elements from one row of both factors to the next, above ``inner`` for a segment of a longer row.
    """

    op: str
    rows: int
    inner: int
    columns: int
    shared: bool
    transposed: bool = True
    stride: int | None = None


def linear_shape(op: str, in_features: int, out_features: int, segments: int = 1) -> ProductShape:
    """Return the product that ``linear`` makes of a layer."""
    columns = -(-out_features // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
    return ProductShape(op, TILE, in_features // segments, columns, shared=True, stride=in_features)


def attention_shapes(heads: int, kv_heads: int, head_dim: int) -> tuple[ProductShape, ProductShape]:
    """Return the two products that ``attention`` makes."""
    rows = QUERY_TILE * (heads // kv_heads)
    return (
        ProductShape("attention scores", rows, head_dim, KEY_BLOCK, shared=False),
        ProductShape("attention values", rows, KEY_BLOCK, head_dim, shared=False, transposed=False),
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
    most, stride = max(_BATCHES), shape.stride or shape.inner

    def strided(x_BMK: Tensor) -> Tensor:
        """Lay rows out as the op's own: the library may choose its path by stride too."""
        return torch.nn.functional.pad(x_BMK, (0, stride - shape.inner))[:, :, : shape.inner]

    a_BMK = torch.randn(most, shape.rows, shape.inner, generator=generator).to(dtype)
    b_BNK = torch.randn(1 if shape.shared else most, shape.columns, shape.inner, generator=generator).to(dtype)
    b_BKN = strided(b_BNK).transpose(1, 2) if shape.transposed else b_BNK.transpose(1, 2).contiguous()
    b_BKN = b_BKN.expand(most, -1, -1)
    alone = torch.cat([product(strided(a_BMK[i : i + 1]), b_BKN[i : i + 1]) for i in range(most)])
    for batch in _BATCHES:
        if not _same(product(strided(a_BMK[:batch]), b_BKN[:batch]), alone[:batch]):
            yield f"{batch} tiles at once differ from one alone"
    a_BMK, b_BKN, alone = a_BMK[:_TILES], b_BKN[:_TILES], alone[:_TILES]
    for shift in range(1, shape.rows, max(1, shape.rows // 3)):
        if not _same(product(strided(a_BMK.roll(shift, 1)), b_BKN), alone.roll(shift, 1)):
            yield f"rows moved down by {shift}"
    if not _same(product(strided(a_BMK.flip(1)), b_BKN), alone.flip(1)):
        yield "rows in reverse order"
    lonely = torch.zeros_like(a_BMK)
    lonely[:, 0] = a_BMK[:, -1]
    if not _same(product(strided(lonely), b_BKN)[:, 0], alone[:, -1]):
        yield "a row among zeros"
    loud = a_BMK.clone()
    loud[:, 1::2] = torch.finfo(dtype).max / 4
    if not _same(product(strided(loud), b_BKN)[:, 0], alone[:, 0]):
        yield "a row beside extreme values"


def prove_scans(vocabulary: int) -> None:
    """Prove that the sampler's running sums of a row are blind to other rows and to where the row is cut off.

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
        first = weights_RV[:, : vocabulary // 3 + 1].cumsum(1)[row]
        whole = _same(alone[0], together[row]) and _same(first, alone[0, : len(first)])
        if not whole or found != torch.searchsorted(alone, aim, right=True)[0]:
            raise NotHeldError(
                f"sampling: this machine's cumsum over {vocabulary} tokens breaks the row law at "
                f"{torch.get_num_threads()} threads; try another OMP_NUM_THREADS or torch build"
            )


def _same(first: Tensor, second: Tensor) -> bool:
    integer = torch.int32 if first.dtype == torch.float32 else torch.int64
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))
