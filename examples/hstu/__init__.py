"""HSTU (Zhai et al., 2024, "Actions Speak Louder than Words"): a ranking model on jagged batches."""

from hstu.embeddings import Embeddings, shard
from hstu.layers import (
    ATTENTIONS,
    Attention,
    HSTUAttention,
    HSTUConfig,
    HSTULayer,
    Sequences,
    attention_flops,
    padded_attention,
)
from hstu.model import HSTURanking, at_least, tables

__all__ = [
    "ATTENTIONS",
    "Attention",
    "Embeddings",
    "HSTUAttention",
    "HSTUConfig",
    "HSTULayer",
    "HSTURanking",
    "Sequences",
    "at_least",
    "attention_flops",
    "padded_attention",
    "shard",
    "tables",
]
