"""`python -m overnight VERB`."""

from overnight.cli.main import command

command()
