"""The engine: a synchronous library that plans, drafts, verifies and commits. It knows no network.

Importing this package pulls in no torch; `engine.runner`, `engine.draft_model` and
`engine.loader` do.
"""
