"""The version, for whoever must not import the whole package to say it."""

__version__ = "0.1.0"
