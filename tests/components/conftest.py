"""Stores of all kinds, for mirrors."""

from tests.store.conftest import bucket as bucket
from tests.store.conftest import bucket_server as bucket_server
from tests.store.conftest import place as place
