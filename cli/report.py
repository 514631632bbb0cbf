"""The facts that an engine reports when it serves: to its supervisor as JSON, to a person in a banner."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Where an engine serves, and what. EngineReport(**asdict(report)) is the same again.

    Attributes:
        process_addresses: of each service process alone.
        admin_addresses: of AdminService; the last is a Unix socket.
    """

    address: str
    process_addresses: list[str]
    admin_addresses: list[str]
    metrics_address: str | None
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def again(self) -> list[str]:
        """Options with which an engine serves at the same addresses."""
        options = [f"--grpc-port={self.address.rpartition(':')[2]}"]
        if self.metrics_address is not None:
            options.append(f"--metrics-port={self.metrics_address.rpartition(':')[2]}")
        return options + [f"--admin-address={address}" for address in self.admin_addresses[:1]]
