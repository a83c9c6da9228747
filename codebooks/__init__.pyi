from .bundle import Bundle, read_bundle
from .config import SemanticIdsConfig
from .make import make_semantic_ids

__all__ = ["Bundle", "SemanticIdsConfig", "make_semantic_ids", "read_bundle"]
