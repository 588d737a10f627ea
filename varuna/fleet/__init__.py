"""Members of a run: the manager, its agents and workers' processes.

``state`` and ``machine`` decide and are pure; ``manager``, ``agent`` and ``workers`` are their shells; ``net`` is what
crosses the network, ``run_folder`` what is on disk, ``engines`` where machines come from.
"""
