"""What happens inside a run, for people and for tools: spans, timelines, progress, reports."""
