from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig
from tests.errors.scene import Row

ROWS = [
    Row(lambda scene: LoaderConfig(batch_size=0), ConfigError, "LoaderConfig: batch_size must be at least 1, got 0"),
]
