"""The meaning of ids in a state: a dataset that it is loaded with must extend the vocabularies of its own."""

import json
from collections.abc import Mapping

from evenrank.core.errors import DataError, StateError
from evenrank.datasets.schema import IdSummary, Manifest

VOCABULARY = "vocabulary"  # entry of a state


def shared_ids(manifests: Mapping[str, Manifest]) -> Mapping[str, IdSummary]:
    """Return the ids of datasets that share embedding tables: of each column, those that extend all others.

    Raises:
        DataError: there are none, so that equal ids mean different values.
    """
    shared: dict[str, IdSummary] = {}
    for name in dict.fromkeys(name for manifest in manifests.values() for name in manifest.ids):
        given = [manifest.ids[name] for manifest in manifests.values() if name in manifest.ids]
        widest = [ids for ids in given if all(ids.extends(other.version) for other in given)]
        if not widest:
            raise DataError(
                f"{', '.join(manifests)} number their {name} differently; preprocess one with --vocabulary of the other"
            )
        shared[name] = widest[0]
    return shared


def vocabulary_entry(ids: Mapping[str, IdSummary]) -> str:
    """Return the entry of a state."""
    return json.dumps({name: summary.version for name, summary in ids.items()}, sort_keys=True)


def check_vocabulary(entry: str, ids: Mapping[str, IdSummary], *, source: str) -> None:
    """Raise a StateError unless all ids mean the same as in the state with this `entry`; `source` names the state."""
    try:
        versions = {str(name): str(version) for name, version in json.loads(entry).items()}
    except (ValueError, AttributeError, RecursionError):
        raise StateError(f"corrupt {source}: field 'vocabulary' cannot be decoded; use another checkpoint") from None
    for name, version in versions.items():
        # Older datasets do not say what the ids of features mean.
        if name in ids and not ids[name].extends(version):
            raise StateError(
                f"{source} has {name} with {_shown(version)}, which this dataset, with "
                f"{_shown(ids[name].version)}, does not extend; preprocess it with --vocabulary of the dataset that "
                "the state is of"
            )


def _shown(version: str) -> str:
    rule, *rest = version.split(" ")
    return f"{rule} ids" if len(rest) < 2 else f"the vocabulary {rest[-1][:12]}"
