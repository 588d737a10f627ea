"""Values that every part of Varuna shares: no torch, no network, no clock, nothing of ours imported."""
