"""A generative recommender on semantic ids: a causal decoder that predicts the codes of the next item."""

from semantic_ids.beam_search import Catalogue, beam_search
from semantic_ids.model import DecoderConfig, DecoderLayer, SemanticIdModel

__all__ = ["Catalogue", "DecoderConfig", "DecoderLayer", "SemanticIdModel", "beam_search"]
