"""A run corrects the calibration that it was planned on, and says why its steps took longer than predicted.

In: a calibration, a plan, times that ranks report. Out: a corrected calibration, a sentence.
"""
