"""Train dumps of context parallelism: each rank holds two slices of every sequence, which are put together here.

The layout is Miles' and slime's (source: ``cp_utils.py`` there): a sequence is cut into ``2 * cp_size`` equal chunks,
the last ones short or empty, and rank r has the chunks r and ``2 * cp_size - 1 - r``. A log-prob belongs to the row
before its token. Only response tokens are dumped, those of the first chunk before those of the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerogap.errors import UsageError

# Columns that are dumped as the rank's slices; tokens and masks are whole on every rank.
SLICED = (
    "log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "entropy",
    "ref_entropy",
    "advantages",
    "returns",
    "values",
)


def response_ranges(total: int, response: int, cp_size: int, cp_rank: int, cut_length: int = 0) -> list[range]:
    """Return the response indices of a rank's two slices, in the order in which they are dumped.

    Args:
        total: prompt and response tokens.
        response: of which response.
        cp_size, cp_rank: of the group and in it.
        cut_length: tokens that were cut into chunks, when the sequence was padded before; ``total`` by default.
    """
    prompt = total - response
    chunk = -(-max(cut_length, total) // (2 * cp_size))
    found = []
    for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
        first, last = max(number * chunk, prompt - 1), min((number + 1) * chunk, total - 1)
        found.append(range(first - prompt + 1, max(first, last) - prompt + 1))
    return found


def assemble(
    slices: Mapping[int, Sequence[Any]], total: int, response: int, cp_size: int, cut: int
) -> list[Any] | None:
    """Return the whole response's values from every rank's slices; None if their lengths are not the layout's."""
    whole: list[Any] = [None] * response
    filled = 0
    for rank, values in slices.items():
        places = [place for part in response_ranges(total, response, cp_size, rank, cut) for place in part]
        if len(places) != len(values):
            return None
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        filled += len(places)
    return whole if filled == response else None


def join_ranks(records: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return one train record of a sample from those of all ranks.

    Args:
        records: what each rank dumped, with ``__cp`` = [cp_rank, cp_size, length that was cut or 0].
        where: names the sample.

    Raises:
        UsageError: a rank's dump is missing, or the slices are not laid out as above.
    """
    joined: dict[str, Any] = {}
    slices: dict[str, dict[int, Sequence[Any]]] = {}
    cp_size = max(int(record["__cp"][1]) for record in records)
    for record in records:
        for key, value in record.items():
            if key in SLICED and isinstance(value, list):
                # Tensor-parallel ranks dump the same slices again.
                slices.setdefault(key, {}).setdefault(int(record["__cp"][0]), value)
            elif key not in ("__cp", "rank"):
                joined.setdefault(key, value)
    cut = int(records[0]["__cp"][2])
    tokens, mask = joined.get("tokens"), joined.get("loss_masks")
    total = joined.get("total_lengths", len(tokens) if isinstance(tokens, list) else None)
    response = joined.get("response_lengths", len(mask) if isinstance(mask, list) else None)
    if not isinstance(total, int) or not isinstance(response, int) or not 0 < response < total:
        raise UsageError(
            f"{where}: slices of context parallelism without total_lengths and response_lengths cannot be placed; "
            "dump with context parallelism off, or export whole sequences as Parquet or JSONL"
        )
    for key, parts in slices.items():
        missing = sorted(set(range(cp_size)) - parts.keys())
        if missing:
            raise UsageError(
                f"{where}: {key} is cut over {cp_size} context-parallel ranks and the dump of rank "
                f"{', '.join(map(str, missing))} is not there; name the folder that holds the dumps of all ranks"
            )
        whole = assemble(parts, total, response, cp_size, cut)
        if whole is None:
            lengths = ", ".join(str(len(parts[rank])) for rank in sorted(parts))
            raise UsageError(
                f"{where}: {key} has {lengths} values on its {cp_size} context-parallel ranks, which is no zigzag of "
                f"{response} response tokens of {total}; dump with context parallelism off, or export whole sequences "
                "as Parquet or JSONL"
            )
        joined[key] = whole
    return joined
