"""The meaning of ids in a state: a dataset that it is loaded with must extend the vocabularies of its own."""

import json
from collections.abc import Mapping

from evenrank.core.errors import DataError, StateError
from evenrank.datasets.schema import IdSummary, Manifest

VOCABULARY = "vocabulary"  # entry of a state


def shared_ids(manifests: Mapping[str, Manifest]) -> Mapping[str, IdSummary]:
    """Return the ids of datasets that share embedding tables: of the one whose vocabularies extend all others.

    Raises:
        DataError: there is none, so that equal ids mean different values.
    """
    for candidate in manifests.values():
        if not any(_foreign(candidate.ids, _versions(other.ids)) for other in manifests.values()):
            return candidate.ids
    names = ", ".join(manifests)
    raise DataError(f"{names} number their ids differently; preprocess one with --vocabulary of the other")


def vocabulary_entry(ids: Mapping[str, IdSummary]) -> str:
    """Return the entry of a state."""
    return json.dumps(_versions(ids), sort_keys=True)


def check_vocabulary(entry: str, ids: Mapping[str, IdSummary], *, source: str) -> None:
    """Raise a StateError unless all ids mean the same as in the state with this `entry`; `source` names the state."""
    try:
        versions = {str(name): str(version) for name, version in json.loads(entry).items()}
    except (ValueError, AttributeError, RecursionError):
        raise StateError(f"corrupt {source}: field 'vocabulary' cannot be decoded; use another checkpoint") from None
    for name in _foreign(ids, versions):
        now = ids[name].version if name in ids else "none"
        raise StateError(
            f"{source} has {name} with {_shown(versions[name])}, which this dataset, with {_shown(now)}, does not "
            "extend; preprocess it with --vocabulary of the dataset that the state is of"
        )


def _versions(ids: Mapping[str, IdSummary]) -> dict[str, str]:
    return {name: summary.version for name, summary in ids.items()}


def _foreign(ids: Mapping[str, IdSummary], versions: Mapping[str, str]) -> list[str]:
    return [name for name, version in versions.items() if name not in ids or not ids[name].extends(version)]


def _shown(version: str) -> str:
    rule, *rest = version.split(" ")
    return f"{rule} ids" if len(rest) < 2 else f"the vocabulary {rest[-1][:12]}"
