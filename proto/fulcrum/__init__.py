"""The contract of Fulcrum (fulcrum.v1) and a small client for it."""
