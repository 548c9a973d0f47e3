from tests.cli.conftest import rooflax

__all__ = ["rooflax"]
