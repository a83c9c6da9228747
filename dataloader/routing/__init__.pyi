from .bucketize import bucketize as bucketize
from .bucketize import map_features as map_features
from .key_map import MODES as MODES
from .key_map import KeyMap as KeyMap
from .key_map import Mode as Mode
from .key_map import Routing as Routing
from .owners import hash_keys as hash_keys
from .owners import owner_rank as owner_rank
from .remap import DIST_TYPE as DIST_TYPE
from .remap import check_dist_type as check_dist_type
from .remap import dist_type as dist_type
from .remap import read_dist_type as read_dist_type
from .remap import remap as remap
from .remap import remap_checkpoint as remap_checkpoint

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
