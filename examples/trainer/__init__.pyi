from .config import TrainConfig
from .job import balance_config, quiet, run_job, set_precision
from .parallel import Pipeline, distribute, make_pipeline, run_pipeline
from .tasks import Task, ranking
from .world import World, join_world

__all__ = [
    "Pipeline",
    "Task",
    "TrainConfig",
    "World",
    "balance_config",
    "distribute",
    "join_world",
    "make_pipeline",
    "quiet",
    "ranking",
    "run_job",
    "run_pipeline",
    "set_precision",
]
