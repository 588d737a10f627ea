"""Who is in the run: the manager, its workers' processes, and the client that workers use."""
