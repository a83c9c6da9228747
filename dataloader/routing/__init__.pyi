from .key_map import MODES, KeyMap, Mode, map_features
from .remap import DIST_TYPE, check_dist_type, dist_type, read_dist_type, remap, remap_checkpoint

__all__ = [
    "DIST_TYPE",
    "MODES",
    "KeyMap",
    "Mode",
    "check_dist_type",
    "dist_type",
    "map_features",
    "read_dist_type",
    "remap",
    "remap_checkpoint",
]
