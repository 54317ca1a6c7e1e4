from tests.islands.conftest import server

__all__ = ["server"]
