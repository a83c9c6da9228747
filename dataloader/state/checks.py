"""Checks of states, which are untrusted input: files of other programs and versions, perhaps damaged.

A loader declares the fields of its state as a `StateFormat`, and loads nothing before all of them have been checked. A
state also has a checksum, because a damaged position may be as plausible as an intact one.
"""

import base64
import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from evenrank.codebooks.bundle import RULE
from evenrank.core.errors import ConfigError, StateError
from evenrank.core.rules import Bounds, Valid
from evenrank.core.settings import check_value, show
from evenrank.datasets.schema import IdSummary

# So that the samples that a mixture has drawn since the first epoch can be counted in int64.
Epoch = Annotated[int, Bounds(at_least=0, below=1 << 31)]
Natural = Annotated[int, Bounds(at_least=0, below=1 << 63)]
Text = Annotated[str, Valid(str.isprintable, "text of one line")]
VOCABULARY = "vocabulary"  # entry of a state: the meaning of its ids, which other datasets must extend
_CHECKSUM = "checksum"
_REMEDY = "load a state that state_dict returned"
_RECONSTRUCT, _SCALAR = np.empty(0).__reduce__()[0], np.int64(0).__reduce__()[0]
# NumPy's arrays and numbers.
_NUMPY_GLOBALS: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSU"},
    *(
        (function, f"numpy.{core}.multiarray.{name}")  # before and since NumPy 2
        for function, name in ((_RECONSTRUCT, "_reconstruct"), (_SCALAR, "scalar"))
        for core in ("core", "_core")
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """The fields of a state, besides its version and its checksum; `owner`, such as "the loader", is for messages."""

    owner: str
    version: int
    fields: Mapping[str, Any]
    """Types, which may carry rules."""
    not_covered: frozenset[str] = frozenset()
    """Fields that the checksum leaves out, because they are checked on their own."""

    def make(self, **entries: Any) -> dict[str, Any]:
        """Return the state with these fields."""
        in_order = {name: entries[name] for name in self.fields}
        return {"version": self.version, **in_order, _CHECKSUM: self._checksum(entries)}

    def check(self, state: object) -> dict[str, Any]:
        """Return a state after checking that it has this version, exactly these fields, and is intact."""
        of_owner = f"the state of {self.owner}"
        if not isinstance(state, Mapping):
            raise StateError(f"{of_owner} must be a mapping, got {show(state)}; {_REMEDY}")
        if "version" not in state:
            entries = f"only {', '.join(map(show, state))}" if state else "and nothing else"
            raise StateError(f"{of_owner} has no version, {entries}; pass what its state_dict() returned")
        found = state["version"]
        if type(found) is not int or found != self.version:
            raise StateError(
                f"{of_owner} has version {show(found)}, expected {self.version}; load it with the version of evenrank "
                "that saved it"
            )
        if missing := [name for name in (*self.fields, _CHECKSUM) if name not in state]:
            raise StateError(f"{of_owner} has no {missing[0]}; {_REMEDY}")
        for name, kind in self.fields.items():
            check_saved(f"{of_owner}: {name}", state[name], kind)
        if unknown := [show(name) for name in state if name not in (*self.fields, "version", _CHECKSUM)]:
            raise StateError(f"{of_owner} has the unknown entry {unknown[0]}; {_REMEDY}")
        check_intact(state[_CHECKSUM] == self._checksum(state), of_owner)
        return dict(state)

    def _checksum(self, entries: Mapping[str, Any]) -> str:
        return checksum(self.version, *(entries[name] for name in self.fields if name not in self.not_covered))


def checksum(*values: object) -> str:
    """Return a hash of values that JSON can hold: 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def check_intact(is_intact: bool, has: str) -> None:
    """Raise a StateError unless `is_intact`; `has` names the owner of the checksum."""
    if not is_intact:
        raise StateError(f"{has} is damaged: its checksum is not that of its contents; load an intact one")


def check_saved(name: str, value: object, kind: Any) -> None:
    """Raise a StateError, which begins with `name`, unless a value is of a type and keeps the rules of it."""
    try:
        check_value(name, value, kind)
    except ConfigError as error:
        raise StateError(f"{error}; {_REMEDY}") from None


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
            remedy = "preprocess it with --vocabulary of the dataset that the state is of"
            if ids[name].rule == RULE:
                remedy = "pass the folder of codes that the state is of, or one made with --append of it"
            raise StateError(
                f"{source} has {name} with {_rule_of(version)}, which this dataset, with "
                f"{_rule_of(ids[name].version)}, does not extend; {remedy}"
            )


def _rule_of(version: str) -> str:
    rule, *rest = version.split(" ")
    return f"{rule} ids" if len(rest) < 2 else f"the vocabulary {rest[-1][:12]}"


def encode(state: object) -> str:
    """Return the state of any loader as text with a checksum, which every format of checkpoints can hold."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"{checksum(content)}:{content}"


def decode(text: str) -> Any:
    """Return the state of a text that `encode` made, without running code from it.

    It may contain plain containers, numbers, text, bytes, tensors, NumPy's arrays, and instances of the classes that
    `torch.serialization.add_safe_globals` was called with; anything else is a StateError.
    """
    saved_checksum, _, encoded = text.partition(":")
    check_intact(saved_checksum == checksum(encoded), "the loader's part of the state")
    content = base64.b64decode(encoded)
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes are read as anything
            unsafe: list[str] = []
            with contextlib.suppress(Exception):  # damaged beyond recognition
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
            if unsafe:
                raise StateError(
                    f"the loader's part of the state contains {unsafe[0]}, which is not loaded from files by default; "
                    "if you trust them, call torch.serialization.add_safe_globals([...]) with that class"
                ) from None
            kind = type(error).__name__
            raise StateError(f"the loader's part of the state is damaged ({kind}); load an intact one") from None
