"""Runs a plan: stage runtime, links, reduction, vote, optimizer step, generations."""
