"""Protocol between the client and the server of a folder, over HTTP/1.1.

| request | reply |
|---|---|
| `POST /store/object/NAME` creates | 201; 200 if it holds this content; 409 if another one |
| `PUT /store/object/NAME` replaces | 201 |
| `GET /store/object/NAME` | 200 with the content and `Store-Modified`; 404 |
| `DELETE /store/object/NAME` | 204 |
| `GET /store/list?prefix=P&after=A` | 200 with a `Listing` |
| `GET /store/wait?prefix=P&mark=M&seconds=S` | 200 with a `Mark`, once it differs from M |

Contents are sealed (seal.py). Each reply has `Store-Now`, the clock of the server. Refusals are a
line of text: 401 unknown login, 403 no permission, 413 too large, 422 damaged, 507 no space, 503
try again.
"""

import msgspec

from torchtitan_diloco.store.store import Listed

OBJECT_ROUTE = "/store/object/"
LIST_ROUTE = "/store/list"
WAIT_ROUTE = "/store/wait"
NOW = "Store-Now"
MODIFIED = "Store-Modified"
MOST_LISTED = 5000
"""Maximum number of objects in a reply."""
MOST_REPLY_BYTES = 2**22
MOST_WAIT_SECONDS = 30.0


class Listing(msgspec.Struct):
    objects: list[Listed]
    more: bool
    """Whether there are others after the last one."""


class Mark(msgspec.Struct):
    mark: str
