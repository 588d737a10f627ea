"""Worker processes of one machine: started, watched, heard, and ended for certain.

In: commands, and a WebSocket per worker. Out: what workers say and how they end, as inputs of the state machine. Used
by ``varuna run`` and by agents.
"""
