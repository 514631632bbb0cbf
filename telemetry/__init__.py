"""What every process does alike: log lines, traces, expiry of certificates, freed memory. Knows none of them."""
