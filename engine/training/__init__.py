"""Makes sets of drafts for a target out of what the target itself writes."""
