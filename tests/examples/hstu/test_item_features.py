"""Features of items in the model: their embeddings, added to those of the items."""

from dataclasses import replace

import torch
from torchrec import EmbeddingCollection

from hstu import HSTURanking, tables
from tests.examples.hstu.samples import CONFIG, NUM_TASKS, SIZES, jagged, make_batch, make_ranking, random_samples


def test_a_model_with_features_of_items_is_one_whose_items_have_the_sums_of_their_embeddings() -> None:
    samples = random_samples(5, seed=2)
    batch, artist_of = make_batch(samples, rows=6), [item * 7 % 11 for item in range(SIZES["item_id"])]
    rows = {key: [sample.get(key, []) for sample in [*samples, {}]] for key in SIZES}
    rows["artist"] = [[artist_of[item] for item in items] for items in rows["item_id"]]
    features, _ = jagged(rows)
    plain, config = make_ranking(), replace(CONFIG, item_features=("artist",))
    embeddings = EmbeddingCollection(tables=tables({**SIZES, "artist": 11}, config))
    model = HSTURanking(embeddings, config, num_tasks=NUM_TASKS).double()
    model.load_state_dict(plain.state_dict(), strict=False)
    artists = embeddings.embeddings["table:artist"].weight
    with torch.no_grad():
        plain.embeddings.embeddings["table:item_id"].weight += artists[artist_of]  # type: ignore[index, union-attr]
    losses, logits = model(batch.replace(features=features))
    expected_losses, expected = plain(batch)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(losses, expected_losses)
    losses.sum().backward()
    assert artists.grad is not None
    shown = {artist for artists_of in rows["artist"] for artist in artists_of}
    assert set(artists.grad.abs().sum(1).nonzero().flatten().tolist()) == shown
