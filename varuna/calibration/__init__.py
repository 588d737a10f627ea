"""Measured costs of sections and links: the format, its files, and the way from samples to a calibration.

In: samples of all workers. Out: ``format.Calibration``, independent of P, D and N_m (paper §"Scale-invariant
Calibration"); ``nominal`` stands in for it until something is measured.
"""
