from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader import CodeTable, LoaderConfig, Negatives, TimeWindows

CODES = CodeTable(codes=np.zeros((4, 2), dtype=np.int32), codebook_sizes=(1, 1))
ONLY_WITHOUT = "^LoaderConfig: {}=.* applies to codes=None, not to codes=CodeTable.*; leave it out$"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, ONLY_WITHOUT.format(name))
            for name, value in {
                "num_tasks": 1,
                "candidate_actions": True,
                "extra_events": ("timestamp_ms",),
                "label": "action",
                "weight": "price",
                "negatives": Negatives(count=1),
            }.items()
        ),
        (
            {"max_num_candidates": 2},
            "^semantic ids have one target each, the last event, got max_num_candidates=2; leave it out$",
        ),
    ],
)
def test_options_that_batches_of_codes_lack_are_errors_of_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        LoaderConfig(batch_size=1, codes=CODES, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codebook_sizes", (1, 1)),
        *((name, True) for name in ("label_offsets", "history_labels", "candidate_feature", "draw_alternatives")),
    ],
)
def test_options_of_codes_need_them(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^LoaderConfig: {name}=.* has no effect without codes; give both, or leave"
    ):
        LoaderConfig(batch_size=1, **{name: value})
    assert getattr(LoaderConfig(batch_size=1, codes=CODES, **{name: value}), name) == value


def test_the_last_event_is_the_one_candidate_of_codes_also_in_a_changed_copy() -> None:
    config = LoaderConfig(batch_size=1, codes=CODES, order=TimeWindows(every="1d"))
    assert config.max_num_candidates == replace(config, batch_size=2).max_num_candidates == 1
