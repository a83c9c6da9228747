"""Features of targets, made when samples are collated: values of expressions, and crosses of columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.expressions import Expression
from evenrank.dataloader.collate.gather import Ints, StoreRows
from evenrank.dataloader.collate.selection import values_at
from evenrank.dataloader.config import LoaderConfig
from evenrank.datasets.schema import FLOAT, ITEM_ID, Schema

# XXH64 (Collet, 2012-2023): https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
_P1, _P2, _P3 = (np.uint64(prime) for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetFeatures:
    """Makes the features of the targets of samples: one event each."""

    config: LoaderConfig
    expressions: Mapping[str, Expression]
    tables: Mapping[str, NDArray[Any]]
    """Features of items, [items] each."""

    @classmethod
    def create(cls, config: LoaderConfig, schema: Schema, tables: Mapping[str, NDArray[Any]]) -> "TargetFeatures":
        """Check expressions and crosses.

        Raises:
            ConfigError: a column is not there, has other values, or a name is taken.
        """
        made = cls(
            config=config, expressions={n: Expression(t) for n, t in config.target_features.items()}, tables=tables
        )
        known = {column.name: np.dtype(column.dtype) for column in schema if column.kind != "list"}
        known |= {name: table.dtype for name, table in tables.items()}
        for name, expression in made.expressions.items():
            if (kind := expression.kind(dict.fromkeys(known, "number"))) == "text":
                raise ConfigError(f"target_features {name!r} is a {kind}; it must be a number or a condition")
        known |= {name: np.dtype(type_) for name, type_ in made.types(schema).items() if name in made.expressions}
        for name, cross in config.crosses.items():
            for column in cross.of:
                if column not in known or known[column].kind not in "biu":
                    there = ", ".join(each for each, dtype in known.items() if dtype.kind in "biu")
                    raise ConfigError(
                        f"cross {name!r} is of {column!r}, which has no integers; there are {there}; add others by "
                        "item_features or target_features"
                    )
        return made

    def types(self, schema: Schema) -> dict[str, str]:
        """Return the type of each feature, `int64` or `float32`, crosses last."""
        empty = {column.name: np.empty(0, dtype=column.dtype) for column in schema if column.kind != "list"}
        empty |= {name: table[:0] for name, table in self.tables.items()}
        kinds = {name: np.asarray(expression(empty)).dtype.kind for name, expression in self.expressions.items()}
        return {name: FLOAT if kind == "f" else "int64" for name, kind in kinds.items()} | dict.fromkeys(
            self.config.crosses, "int64"
        )

    def values(self, groups: Sequence[StoreRows], targets: Ints) -> dict[str, NDArray[Any]]:
        """Return each feature of n samples, [n], given the places of their targets among the events of their stores."""
        crosses = self.config.crosses
        names = {name for expression in self.expressions.values() for name in expression.names}
        names |= {name for cross in crosses.values() for name in cross.of} - self.expressions.keys()
        columns = {name: self._column(name, groups, targets) for name in sorted(names)}
        made = {
            name: np.broadcast_to(np.asarray(expression(columns)), targets.shape)
            for name, expression in self.expressions.items()
        }
        made = {name: values.astype(FLOAT if values.dtype.kind == "f" else "int64") for name, values in made.items()}
        for name, cross in crosses.items():
            words = np.stack([(columns | made)[each].astype(np.int64) for each in cross.of], axis=1)
            made[name] = np.empty(len(targets), dtype=np.int64)
            _cross(words.view(np.uint64), np.uint64(cross.seed), np.uint64(cross.size), made[name])
        for name in made.keys() & self.config.key_maps.keys():
            made[name] = self.config.key_maps[name](made[name])
        return made

    def _column(self, name: str, groups: Sequence[StoreRows], targets: Ints) -> NDArray[Any]:
        """Return the values of a column at the targets: [n], as they are before key maps."""
        source = ITEM_ID if name in self.tables else name
        values = np.empty(len(targets), dtype=np.int64)
        for store, rows, samples in groups:
            is_event = any(column.name == source and column.kind == "event" for column in store.manifest.columns)
            events, columns = targets[samples], store.columns
            of_store = values_at(store, source, events) if is_event else columns[source][store.rows_of(rows)]
            if source == name and name in store.column_maps:
                of_store = store.column_maps[name].inverse(of_store)
            values = values.astype(np.result_type(values, of_store), copy=False)
            values[samples] = of_store
        if name in self.tables:
            key_map, values = self.config.key_maps.get(name), self.tables[name][values]
            return values if key_map is None else key_map.inverse(values)
        return values


@compiled
def _cross(words: NDArray[np.uint64], seed: np.uint64, size: np.uint64, out: Ints) -> None:
    """Hash the rows of `words`, [n, k], as 8 k bytes each, the first byte of a word lowest."""
    width = words.shape[1]
    lanes = np.empty(4, dtype=np.uint64)
    for row in range(len(words)):
        place = 0
        if width >= 4:
            lanes[0], lanes[1], lanes[2], lanes[3] = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            while place + 4 <= width:
                for lane in range(4):
                    lanes[lane] = _round(lanes[lane], words[row, place + lane])
                place += 4
            hashed = _rotate(lanes[0], 1) + _rotate(lanes[1], 7) + _rotate(lanes[2], 12) + _rotate(lanes[3], 18)
            for lane in range(4):
                hashed = (hashed ^ _round(np.uint64(0), lanes[lane])) * _P1 + _P4
        else:
            hashed = seed + _P5
        hashed += np.uint64(8 * width)
        while place < width:
            hashed = _rotate(hashed ^ _round(np.uint64(0), words[row, place]), 27) * _P1 + _P4
            place += 1
        hashed = (hashed ^ (hashed >> np.uint64(33))) * _P2
        hashed = (hashed ^ (hashed >> np.uint64(29))) * _P3
        out[row] = np.int64((hashed ^ (hashed >> np.uint64(32))) % size)


@compiled
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _P2, 31) * _P1


@compiled
def _rotate(word: np.uint64, bits: int) -> np.uint64:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))
