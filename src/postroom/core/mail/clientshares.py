"""Shares of clients: no client and no organization can use up a resource of the server."""

from postroom.core.mail.mailbox import organization_of


class ClientShares:
    """The use of a resource by client and by organization, with a limit for both."""

    def __init__(self, client_max: int, organization_max: int) -> None:
        self._client_max = client_max
        self._organization_max = organization_max
        self.used: dict[str, int] = {}
        """By client, and by the name of an organization followed by a slash."""

    def __bool__(self) -> bool:
        return bool(self.used)

    def fits(self, client: str, more: int) -> bool:
        """Whether a client may use more."""
        org = organization_of(client)
        used = self.used.get
        return used(client, 0) + more <= self._client_max and (
            not org or used(f"{org}/", 0) + more <= self._organization_max
        )

    def add(self, client: str, more: int) -> bool:
        """Count more, or less. Returns False above a limit; the amount is counted in any case."""
        org = organization_of(client)
        fits_client = counted(self.used, client, more) <= self._client_max
        fits_organization = not org or counted(self.used, f"{org}/", more) <= self._organization_max
        return fits_client and fits_organization


def counted(counts: dict[str, int], key: str, more: int) -> int:
    """Add to a count, and drop it at zero. Returns the count."""
    count = counts.pop(key, 0) + more
    if count > 0:
        counts[key] = count
    return count
