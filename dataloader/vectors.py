"""`VectorLookup`: ids of a batch -> the dense vectors of these items or users, on the device that trains."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.schema import ITEM_ID
from evenrank.datasets.vectors import VectorSource, open_vectors

_BYTES_AT_ONCE = 1 << 26
_DTYPES = {"float16": torch.float16, "float32": torch.float32}


class _Mapped:
    """A mapped file, which copies and other processes map again: copies of a model have no copies of it."""

    def __init__(self, *given: Any) -> None:
        path, dtype, offset, shape = self._given = given
        self.array = np.memmap(path, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mapped, self._given


class VectorLookup(nn.Module):
    """The dense vectors of the items or users of a dataset by id: a module without parameters and saved state.

    All vectors are a table on one device, which moves with the module. It is no buffer, which DistributedDataParallel
    would broadcast before each step. With `on_host=True`, for tables larger than a device's memory, vectors are read
    from the mapped file, which the processes of a host share, into pinned memory, and copied to the device of the ids;
    that waits for the ids.

    Args:
        data: an open store or stream, or the folder or URL of a dataset with vectors.
        of: `item_id` or `user_id`.
        device: where the table is; None: PyTorch's default.
        key_map: that of these ids in `LoaderConfig.key_maps`, by which batches have rows in their place.
        on_host: whether vectors stay in the file.

    Raises:
        ConfigError: the device is `meta`, or given with `on_host`; or the key map has fewer rows than there are ids.
        DataError: the dataset has no such vectors, or the file is not that of its manifest.
    """

    def __init__(
        self,
        data: VectorSource,
        of: str = ITEM_ID,
        device: torch.device | str | None = None,
        key_map: KeyMap | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        super().__init__()
        vectors = open_vectors(data, of)
        size, self.width = vectors.shape
        self.num_ids = size if key_map is None else key_map.num_embeddings
        self._key_map = key_map
        self._mapped: _Mapped | None = None
        self._table: Tensor | None = None
        if self.num_ids < size:
            raise ConfigError(f"key_map has {self.num_ids:,} rows, fewer than the {size:,} ids of {of}; make it larger")
        if on_host:
            if device is not None:
                raise ConfigError(f"on_host=True has no table on a device; leave device={str(device)!r} out")
            self._mapped = _Mapped(vectors.filename, vectors.dtype.str, vectors.offset, vectors.shape)
            return
        self._table = torch.zeros(self.num_ids, self.width, dtype=_DTYPES[vectors.dtype.name], device=device)
        if self._table.is_meta:
            raise ConfigError("a table of vectors cannot be on device 'meta', where it has no values; pass device=")
        at_once = max(1, _BYTES_AT_ONCE // vectors[0].nbytes)
        for begin in range(0, size, at_once):
            block = torch.from_numpy(np.array(vectors[begin : begin + at_once])).to(self._table.device)
            ids = np.arange(begin, begin + len(block))
            rows = ids if key_map is None else key_map(ids)
            self._table[torch.from_numpy(rows).to(block.device)] = block

    def forward(self, values: Tensor) -> Tensor:
        """Return the vectors of ids, [...] int64 or int32: [..., d] of the file's dtype, on the device of the ids.

        Those of ids without a vector are zeros.

        Raises:
            DataError: with `on_host`, an id is not below `num_ids`; otherwise PyTorch has an error of its own.
        """
        return self._read(values) if self._table is None else functional.embedding(values, self._table)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # which would trace functions of NumPy
    def _read(self, values: Tensor) -> Tensor:
        """Return the vectors of ids from the mapped file."""
        assert self._mapped is not None
        vectors, ids = self._mapped.array, values.cpu().numpy().reshape(-1)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_ids:
            raise DataError(
                f"ids must be in 0..{self.num_ids - 1}, as in the dataset of the vectors, got {ids.min()} to "
                f"{ids.max()}; pass batches of that dataset, and their key_map"
            )
        if self._key_map is not None:
            ids = self._key_map.inverse(ids)
            ids = np.where(ids < len(vectors), ids, 0)  # further rows of the table, as unknown ones
        found = torch.empty(
            len(ids), self.width, dtype=_DTYPES[vectors.dtype.name], device="cpu", pin_memory=values.is_cuda
        )
        np.take(vectors, ids, axis=0, out=found.numpy(), mode="clip")  # other modes make a copy
        return found.to(values.device, non_blocking=True).reshape(*values.shape, self.width)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the table as `to` moves a buffer, but with its values, which `to_empty` would not keep."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._table is not None:
            moved = fn(self._table[:0])
            self._table = self._table.to(moved.device, moved.dtype)
        return self
