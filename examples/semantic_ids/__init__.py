"""A generative recommender on semantic ids: a causal decoder that predicts the codes of the next item."""
