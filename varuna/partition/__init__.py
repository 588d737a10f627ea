"""From an unmodified model to sections: capture, costs, cut-points, one graph module per section."""
