"""Measured costs of sections and links; until they are measured, `varuna.core.nominal` stands in."""
