"""Where K and V live: the pool of pages, and the tree that shares them between equal prefixes. No torch."""
