"""Generated from inference.proto by `make proto`."""
