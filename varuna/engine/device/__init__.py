"""The device beside the host: its streams, copies between both, and how much memory it has."""
