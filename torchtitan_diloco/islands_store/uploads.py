"""Objects of the syncer in flight: announced in a decision, then uploaded, then named."""

from dataclasses import dataclass

from torchtitan_diloco.islands_store.names import Object


@dataclass
class _Upload:
    number: int = 0  # of the decision that announces it
    is_announced: bool = False
    is_prepared: bool = False
    """Whether its bytes are stored."""
    is_started: bool = False


class Uploads:
    """An upload starts when its announcement counts, and may outlast many decisions."""

    def __init__(self) -> None:
        self._uploads: dict[tuple[str, int, int], _Upload] = {}

    def plan(self, kind: str, fragment: int, version: int) -> None:
        self._uploads[kind, fragment, version] = _Upload()

    def cancel(self, kind: str, fragment: int, version: int) -> None:
        self._uploads.pop((kind, fragment, version), None)

    def prepare(self, kind: str, fragment: int, version: int) -> None:
        if (kind, fragment, version) in self._uploads:
            self._uploads[kind, fragment, version].is_prepared = True

    def is_under_way(self, kind: str, fragment: int) -> bool:
        return any(key[:2] == (kind, fragment) for key in self._uploads)

    def __bool__(self) -> bool:
        return bool(self._uploads)

    def announce(self, number: int) -> list[Object]:
        """Return the objects that decision `number` must announce, still or for the first time."""
        announced = list[Object]()
        for (kind, fragment, version), upload in self._uploads.items():
            upload.number = upload.number or number
            announced.append(Object(kind, upload.number, fragment, version))
        return announced

    def commit(self, number: int) -> None:
        for upload in self._uploads.values():
            upload.is_announced |= 0 < upload.number <= number

    def start(self) -> list[Object]:
        """Return the objects whose upload starts now."""
        begun = list[Object]()
        for (kind, fragment, version), upload in self._uploads.items():
            if upload.is_announced and upload.is_prepared and not upload.is_started:
                upload.is_started = True
                begun.append(Object(kind, upload.number, fragment, version))
        return begun

    def finish(self, stored: Object) -> bool:
        """Record the end of an upload, and return whether the object is still wanted."""
        key = stored.kind, stored.fragment, stored.version
        upload = self._uploads.get(key)
        if upload is None or upload.number != stored.number:
            return False
        del self._uploads[key]
        return True
