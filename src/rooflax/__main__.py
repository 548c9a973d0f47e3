"""`python -m rooflax`."""

from rooflax.cli.main import entry

if __name__ == "__main__":
    entry()
