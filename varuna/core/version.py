"""The version, for modules that need it without importing the whole package."""

__version__ = "0.1.0"
