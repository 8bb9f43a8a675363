"""Recognizes message ids that the store made. Such an id contains the number of its record."""

from postroom.core.ids import number_in_uuid, store_tag

NUMBER_DIGITS_MAX = 18
UUID_CHARS = 36


class OwnIds:
    """Finds the number of a record by its id. The `Known` class of each backend derives from this class."""

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id
        self.prefix = f"{store_id}-"
        """The prefix of ids that the store makes for tasks."""

    def own_number(self, message_id: str) -> int:
        """The number in an id that the store made; 0 for any other id."""
        number = message_id.removeprefix(self.prefix)
        if len(number) == UUID_CHARS:
            return number_in_uuid(number, store_tag(self.store_id))
        is_own = (
            len(number) != len(message_id)
            and number.isdigit()
            and number.isascii()
            and number[0] != "0"
            and len(number) <= NUMBER_DIGITS_MAX
        )
        return int(number) if is_own else 0
