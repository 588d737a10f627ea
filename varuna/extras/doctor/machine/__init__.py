"""This machine before a run, looked at: everything at once, each part within a bound; nothing is left behind."""
