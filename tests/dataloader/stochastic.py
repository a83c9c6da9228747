"""`StochasticLength`, read plainly: one history after the other, in Python's integers."""

from evenrank.dataloader import StochasticLength

_WORDS = 1 << 64


def _mix(word: int) -> int:
    """Return the finalizer of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % _WORDS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % _WORDS
    return word ^ word >> 31


def kept_events(
    length: int, longest: int, settings: StochasticLength, *, seed: int, epoch: int, sample_id: int
) -> list[int]:
    """Return which of the newest `longest` of a history's events are kept: places of 0..length-1, ascending."""
    first = max(0, length - longest)
    length, limit = length - first, longest ** (settings.alpha / 2)
    word = _mix(_WORDS - 1 - _mix(_mix(_mix(seed % _WORDS) ^ epoch) ^ _mix(sample_id)))
    units = [(_mix((word + number * 0x9E3779B97F4A7C15) % _WORDS) >> 11) / 2**53 for number in range(1, length + 2)]
    kept = list(range(length))
    if length > limit + 1e-9 and units[0] >= (limit / length) ** 2:
        older, kept = kept[: length - settings.newest], kept[length - settings.newest :]
        for place in older:
            needed = int(limit + 1e-9) - len(kept)
            if units[1 + place] < needed / (len(older) - place):
                kept.append(place)
    return [first + place for place in sorted(kept)]
