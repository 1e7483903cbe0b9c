"""`python -m overnight COMMAND`."""

from overnight.cli.main import command

command()
