"""Options that several `engine` commands share."""

from typing import Any

import click

from postroom.cli.server_options import token_option
from postroom.cli.shell import DATA_DEFAULT, place_option, together

_PLACE = "The data folder, whose store is DIR/queue.db, or a store (postgres://..., amqp://...)."
data_option = place_option(_PLACE)
default_data_option = place_option(f"{_PLACE}  {DATA_DEFAULT}")
url_option = click.option("--url", metavar="URL", help="The address of a server, instead of --data.")
where_options = together(default_data_option, url_option, token_option)
message_argument = click.argument("message_id", metavar="MESSAGE_ID")
org_option = click.option("--org", "org_id", metavar="NAME", help="Only messages of this organization.")
type_option = click.option("--type", "type_name", metavar="TYPE", help="Only messages of this type.")
PRIORITY = click.IntRange(0, 3)


def filters_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as filters of the contract."""
    named = {"type" if name == "type_name" else name: value for name, value in options.items()}
    return {name: value for name, value in named.items() if value is not None}
