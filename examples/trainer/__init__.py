"""A training job around the models of the other folders: data, balance, checkpoints, evaluation and logs."""
