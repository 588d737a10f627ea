"""Links before a run, in a process of its own that imports torch, which may take long, hang or die."""
