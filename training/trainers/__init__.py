"""Adapters of trainers of other packages, each imported from its own module, because it needs that package."""
