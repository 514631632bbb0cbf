"""The model: its configuration, its files, its weights and its layers. Knows no sequences and no requests."""
