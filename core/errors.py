"""The exceptions that users meet. Each message is one line: what is wrong, where, and what to do about it."""


class EvenrankError(Exception):
    """Whatever evenrank raises on purpose; command lines print its message and exit with 2."""


class ConfigError(EvenrankError, ValueError):
    """A setting or an argument is out of its range, or does not go with another."""


class DataError(EvenrankError, ValueError):
    """A file is missing, malformed, or not what its place promises."""


class StateError(EvenrankError, ValueError):
    """A saved position does not belong to this dataset, or not to this version."""


class RankError(EvenrankError, RuntimeError):
    """Some rank failed, or ranks disagree; raised on every rank with the failing rank's own words."""
