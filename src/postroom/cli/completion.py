"""`postroom completion`: the script that completes commands and options in a shell."""

import click

from postroom.cli.shell import HELP_OPTIONS, Shell

SHELLS = ("bash", "zsh", "fish")


@click.command(context_settings=HELP_OPTIONS)
@click.argument("shell_name", type=click.Choice(SHELLS), metavar="[bash|zsh|fish]")
@click.pass_context
def completion(context: click.Context, shell_name: str) -> None:
    """Print the script that completes commands and options with the Tab key.

    Write it to a file that your shell reads. The script asks `postroom` itself, so it need not be renewed
    after an upgrade.

    \b
    Example:
      postroom completion bash > ~/.local/share/bash-completion/completions/postroom
      postroom completion zsh > "${fpath[1]}/_postroom"
      postroom completion fish > ~/.config/fish/completions/postroom.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    root = context.find_root()
    kind = get_completion_class(shell_name)
    assert kind is not None  # noqa: S101 - for the type checker: click knows these shells
    program = str(root.info_name)
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    # Not the method of the class for bash: that one runs bash to see its version.
    script = ShellComplete.source(kind(root.command, {}, program, variable))
    shell = context.find_object(Shell)
    assert shell is not None  # noqa: S101 - for the type checker: the group makes it
    for line in script.splitlines():
        shell.output.text(line)
