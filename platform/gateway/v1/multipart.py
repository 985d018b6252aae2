"""A multipart form as it arrives: small fields kept, the bytes of its one file handed on piece by piece.

Knows RFC 7578 through python-multipart; refuses to know what the fields mean and where the file goes.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import InvalidRequest, Reason, invalid

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1_024
MAX_NAME = 255


class Form:
    """Always: holds no more of the file than one piece, and of everything else a few kilobytes."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequest for another media type and for a boundary that is none."""
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if media_type != b"multipart/form-data" or not boundary:
            raise invalid(
                Reason.UNSUPPORTED_MEDIA_TYPE, "Send the file as 'Content-Type: multipart/form-data; boundary=…'."
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._is_whole = False
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._field = ""
        self._value = bytearray()
        self._in_file = False
        self._file_parts: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_header_begin": self._begin_header,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._open_part,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise _broken(error) from error

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in this piece of the body. Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(error) from error
        piece, self._file_parts = b"".join(self._file_parts), []
        return piece

    def close(self) -> None:
        """Raises InvalidRequest where the form ended before it was whole."""
        if not self._is_whole:
            raise invalid(Reason.INVALID_REQUEST, "The form breaks off before its last boundary.")

    def _begin_part(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header = (bytearray(), bytearray())

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)

    def _open_part(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise invalid(Reason.INVALID_REQUEST, "A part of the form has no name.")
        self._in_file = b"filename" in options
        if (self.filename is not None) if self._in_file else (name in self.fields):
            raise invalid(Reason.INVALID_VALUE, f"The form has {name[:80]!r} more than once.", name[:80])
        if self._in_file:
            if name != "file":
                raise invalid(Reason.UNKNOWN_PARAMETER, f"Unknown parameter: {name[:80]!r}.", name[:80])
            self.filename = options[b"filename"].decode("utf-8", "replace")
        elif len(self.fields) >= MAX_FIELDS:
            raise invalid(Reason.INVALID_REQUEST, f"The form has more than {MAX_FIELDS} fields.")
        self._field, self._value = name, bytearray()

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_parts.append(data[start:end])
            return
        self._value.extend(data[start:end])
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid(Reason.INVALID_VALUE, f"{self._field[:80]!r} is too long for a field.", self._field[:80])

    def _end_part(self) -> None:
        if not self._in_file:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._is_whole = True


def _broken(error: FormParserError) -> InvalidRequest:
    return invalid(Reason.INVALID_REQUEST, f"The form cannot be read: {error}.")
