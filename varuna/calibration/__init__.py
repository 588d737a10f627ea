"""Measured costs of sections and links; until they are measured, `varuna.core.calibration.NOMINAL` stands in."""
