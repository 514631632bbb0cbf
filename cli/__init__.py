"""The `fulcrum` command: parses, starts, supervises. Holds no serving logic of its own."""
