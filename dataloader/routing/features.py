"""The keys of a KeyedJaggedTensor -> rows of tables, for batches that no loader of ours makes."""

from collections.abc import Mapping

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.key_map import KeyMap


def map_features(features: KeyedJaggedTensor, key_maps: Mapping[str, KeyMap]) -> KeyedJaggedTensor:
    """Return the same features with the rows of tables instead of keys.

    On a GPU this waits for the device, because it checks the keys; map on the CPU, where batches are made.

    Args:
        features: with integer values, on any device.
        key_maps: of some of its features, by name.

    Raises:
        ConfigError: there is no such feature, or its dtype cannot hold all rows.
        DataError: a key is not in the table.

    """
    names = features.keys()
    if unknown := [name for name in key_maps if name not in names]:
        raise ConfigError(f"key_maps has {unknown[0]!r}, which is no feature; there are {', '.join(names)}")
    ends = features.offset_per_key()
    values = features.values().clone()
    for name, begin, end in zip(names, ends, ends[1:], strict=False):
        if name in key_maps:
            values[begin:end] = key_maps[name](values[begin:end])
    return KeyedJaggedTensor(
        keys=names,
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
        stride=None if features.variable_stride_per_key() else features.stride(),
        length_per_key=features.length_per_key(),
        offset_per_key=ends,
        inverse_indices=features.inverse_indices_or_none(),
    )
