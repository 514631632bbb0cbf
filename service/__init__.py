"""The gRPC server in front of the engine: text in, text out."""
