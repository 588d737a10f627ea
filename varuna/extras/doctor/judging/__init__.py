"""From facts of machines before a run to findings: what was seen, how bad it is, what to do. Pure."""
