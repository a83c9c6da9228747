from .bucketize import bucketize, map_features
from .key_map import MODES, KeyMap, Mode, Routing
from .owners import hash_keys, owner_rank
from .remap import DIST_TYPE, check_dist_type, dist_type, read_dist_type, remap, remap_checkpoint

__all__ = [
    "DIST_TYPE",
    "MODES",
    "KeyMap",
    "Mode",
    "Routing",
    "bucketize",
    "check_dist_type",
    "dist_type",
    "hash_keys",
    "map_features",
    "owner_rank",
    "read_dist_type",
    "remap",
    "remap_checkpoint",
]
