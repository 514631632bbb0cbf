"""What every process says of itself in the same way: log lines and traces. Knows none of them."""
