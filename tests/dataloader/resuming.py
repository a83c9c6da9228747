"""States of loaders: changed, and as formats of checkpoints return them."""

import io
import json
from collections.abc import Mapping
from typing import Any

import torch

from evenrank.dataloader.state.checks import StateFormat


def with_changes(state_format: StateFormat, state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other entries, and the checksum of these."""
    return state_format.make(**{name: {**state, **changes}[name] for name in state_format.fields})


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
