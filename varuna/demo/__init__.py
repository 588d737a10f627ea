"""The demo: a run that loses workers, and the proof that its losses do not care."""
