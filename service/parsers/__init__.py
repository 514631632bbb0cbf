"""What a model's text means: reasoning, tool calls, and content. Knows text alone: no tokens, no protobuf, no RPC."""
