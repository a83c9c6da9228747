"""HSTU (Zhai et al., 2024, "Actions Speak Louder than Words"): a ranking and a retrieval model on jagged batches."""
