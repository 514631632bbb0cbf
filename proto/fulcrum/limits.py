"""The most that a request may hold. The engine refuses what is more; a gateway does so before, by the names of HTTP."""

MESSAGE_BYTES = 16 << 20  # of gRPC, both ways
N = 128
STOPS = 16
LISTED_IDS = 1024  # of logit_bias, and of stop_token_ids
TOP_LOGPROBS = 20
CHOICES = 1024
SALT_BYTES = 256
MESSAGES = 8192
PARTS = 2048  # of a message
CALLS = 128  # of a message
TOOLS = 128
