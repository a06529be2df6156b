"""How much memory the engine has and how large its steps are."""

from __future__ import annotations

from dataclasses import dataclass

from zerogap.errors import UsageError


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; exactly one of ``kv_bytes`` and ``num_pages`` says how much KV memory there is.

    Attributes:
        page_size: positions per page of KV memory.
        kv_bytes: KV memory in bytes, cut into as many whole pages as fit.
        num_pages: KV memory in pages.
        max_rows_per_step: rows per forward at most; a longer prompt is computed in chunks.
        max_sequences: running sequences at most.
        prefix_cache: reuse pages of equal beginnings.
        max_length: prompt and generated tokens of the run's longest sequence; if given, memory that cannot hold one
            such sequence is refused at the start.
        cuda_graphs: on a GPU, replay captured decode steps; no bit depends on it.
    """

    page_size: int = 16
    kv_bytes: int | None = None
    num_pages: int | None = None
    max_rows_per_step: int = 512
    max_sequences: int = 256
    prefix_cache: bool = True
    max_length: int | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("page_size", "max_rows_per_step", "max_sequences"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: must be 1 or more, not {getattr(self, name)}")
        if (self.kv_bytes is None) == (self.num_pages is None):
            raise UsageError("KV memory: give exactly one of kv_bytes and num_pages")


def page_count(config: EngineConfig, bytes_per_page: int, max_positions: int) -> int:
    """Return how many pages there are.

    Args:
        config: the engine's sizes.
        bytes_per_page: keys and values of one page in all layers.
        max_positions: the model's context length.

    Raises:
        UsageError: if not one page fits, or not one sequence of ``config.max_length`` tokens.
    """
    pages = config.num_pages if config.kv_bytes is None else config.kv_bytes // bytes_per_page
    assert pages is not None
    length = max_positions if config.max_length is None else config.max_length
    least = 1 if config.max_length is None else -(-length // config.page_size)
    if pages < least:
        need = -(-length // config.page_size)
        raise UsageError(
            f"KV memory: {max(pages, 0)} pages ({max(pages, 0) * bytes_per_page:,} bytes) are too little; one sequence"
            f" of {length} tokens needs {need} pages of {config.page_size} ({need * bytes_per_page:,} bytes)"
        )
    return pages
