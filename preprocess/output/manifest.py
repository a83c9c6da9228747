"""The manifest of a dataset from the description of its parts."""

from collections.abc import Mapping

from evenrank.datasets.schema import (
    ACTION,
    ITEM_ID,
    SCHEMA_VERSION,
    USER_ID,
    Manifest,
    SourceFile,
    Split,
    content_hash,
)


def make_manifest(
    *,
    dataset: str,
    sources: tuple[SourceFile, ...],
    options: Mapping[str, object],
    splits: Mapping[str, Split],
    largest: Mapping[str, int],
    num_actions: int | None,
    context_labels: Mapping[str, tuple[str | None, ...]],
    extra_events: Mapping[str, str],
) -> Manifest:
    """Return the manifest, with vocabulary sizes and the content hash.

    Args:
        dataset: name of the dataset.
        sources: the raw files.
        options: the options of preprocessing and the audit, as JSON values.
        splits: the splits that were written.
        largest: the largest user_id, item_id and action over all splits, -1 if there is none.
        num_actions: number of actions; None if it follows from `largest`.
        context_labels: per contextual feature in column order, the labels of ids 0, 1, ...
        extra_events: further list columns and their element types.

    """
    contextual = tuple(context_labels)
    vocabulary_sizes = {
        USER_ID: largest[USER_ID] + 1,
        ITEM_ID: largest[ITEM_ID] + 1,
        ACTION: num_actions or largest[ACTION] + 1,
        **{name: len(labels) for name, labels in context_labels.items()},
    }
    return Manifest(
        schema_version=SCHEMA_VERSION,
        dataset=dataset,
        sources=sources,
        options=options,
        splits=splits,
        contextual=contextual,
        extra_events=extra_events,
        vocabulary_sizes=vocabulary_sizes,
        context_labels=context_labels,
        content_hash=content_hash(
            splits=splits, contextual=contextual, extra_events=extra_events, vocabulary_sizes=vocabulary_sizes
        ),
    )
