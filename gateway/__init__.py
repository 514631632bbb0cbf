"""The OpenAI-compatible HTTP gateway. It renames fields: no torch, no tokenizer, no model files."""
