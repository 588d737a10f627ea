"""Values that every part of Varuna shares: no torch, no network, nothing of ours imported."""
