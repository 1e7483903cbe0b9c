"""`python -m overnight VERB`."""

from overnight.cli import command

command()
