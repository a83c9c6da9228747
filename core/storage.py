"""Files on this host and at URLs that pyarrow opens: s3://bucket/path, gs://..., abfs://..., hdfs://..., file:///path.

Credentials come from where pyarrow looks for them: the environment, configuration files, the host's role or the URL.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from evenrank.core.errors import DataError, first_line
from evenrank.core.listing import list_files, matches

if TYPE_CHECKING:  # the command line imports this module
    from pyarrow import fs

CONNECTIONS = 8  # files that are transferred at a time
_CHUNK = 16 << 20  # bytes of a request
# A `Path` has made one slash of the two. Other schemes are URLs too, because what is meant is no folder `foo:`.
_URL = re.compile(
    r"(?:(s3|gs|gcs|abfss?|hdfs|viewfs|file|https?):(?:/+|$)|([a-z][\w+.-]+):/+)(.*)", re.DOTALL | re.IGNORECASE
)
# Credentials, which may have slashes by mistake; bucket or host; path; options.
_PARTS = re.compile(r"([^/?@]*:(?!\d+/)[^@]*@)?([^/?]*)/*([^?]*)(\?.*)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A file or folder at a URL. Its methods raise a DataError of one line, without credentials."""

    files: "fs.FileSystem"
    path: str
    """In the file system, without a slash at the end."""
    url: str
    """Without credentials and options."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Remote":
        return replace(self, path=f"{self.path}/{name}", url=f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    def info(self) -> "fs.FileInfo":
        """Return the type, size and time of the file or folder."""
        with _wrap_errors(self, "read"):
            return self.files.get_file_info(self.path)

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return bool(self.info().is_file)

    def has_container(self) -> bool:
        """Return whether the bucket or container exists that the path begins with."""
        container = replace(self, path=self.path.partition("/")[0] or "/")
        return bool(container.info().type.name != "NotFound")

    def files_below(self, pattern: Sequence[str] | None = None) -> "dict[str, fs.FileInfo]":
        """Return the sizes and times of files in a folder, at any depth, by their paths relative to it.

        These are all, also hidden ones, or those that a pattern stands for; see `core.listing`.
        """
        from pyarrow import fs

        with _wrap_errors(self, "listed"):
            if pattern is not None and self.files.type_name == "local":
                paths = [f"{self.path}/{name}" for name in list_files(Path(self.path), pattern)]
                pattern = None
            else:
                paths = fs.FileSelector(self.path, allow_not_found=True, recursive=True)
            infos = self.files.get_file_info(paths)
        found = {info.path[len(self.path) + 1 :]: info for info in infos if info.is_file}
        return found if pattern is None else {name: found[name] for name in found if matches(pattern, name)}

    def chunks(self) -> Iterator[bytes]:
        """Yield the content of a file, as it is stored."""
        with _wrap_errors(self, "read"), self.files.open_input_stream(self.path, compression=None) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk

    def read(self) -> bytes:
        """Return the content of a file."""
        return b"".join(self.chunks())

    def etag(self) -> str:
        """Return what identifies the content of a file, or an empty text if the store has no such thing."""
        with _wrap_errors(self, "read"), self.files.open_input_file(self.path) as file:
            found: bytes = next((value for key, value in file.metadata().items() if key.lower() == "etag"), b"")
        return found.decode()

    def upload(self, source: Path) -> None:
        """Replace the file by one of this host; readers see the old one until all of it is there."""
        from pyarrow import fs

        with _wrap_errors(self, "written"):
            fs.copy_files(
                str(source), self.path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=self.files
            )

    def delete(self, *, is_folder: bool) -> None:
        """Delete a file, or a folder with all that is in it."""
        with _wrap_errors(self, "deleted"):
            (self.files.delete_dir if is_folder else self.files.delete_file)(self.path)


def is_url(place: Path | str) -> bool:
    """Return whether a place is a URL other than `file://`; it may have become a `Path`."""
    found = _URL.fullmatch(str(place))
    return found is not None and (found[1] or "").lower() != "file"


def local_path(place: Path | str) -> Path:
    """Return the path on this host of a place that is no URL, or one with `file://`."""
    found = _URL.fullmatch(str(place))
    return Path(place) if found is None else Path("/", unquote(found[3].lstrip("/")))


def locate(place: Path | str) -> Path | Remote:
    """Return the path, or what is at the URL; raises a DataError if pyarrow does not know the URL."""
    found = _URL.fullmatch(str(place))
    if found is None or not is_url(place):
        return local_path(place)
    scheme, rest = (found[1] or found[2]).lower(), found[3]
    import pyarrow as pa
    from pyarrow import fs

    credentials, host, path, options = _PARTS.fullmatch(rest).groups(default="")  # type: ignore[union-attr]
    path = unquote(path).rstrip("/")
    shown = f"{scheme}://{host}" + f"/{path}" * bool(path)
    if not host and scheme != "hdfs":  # which may have a default one
        raise DataError(f"{shown} names no bucket; write {scheme}://BUCKET/PATH")
    try:
        files, root = fs.FileSystem.from_uri(given := f"{scheme}://{credentials}{host}{options}")
    except (OSError, pa.ArrowException) as error:
        # The message may quote the credentials, and so would that of a chained exception.
        reason = first_line(error).replace(given, shown)
        if credentials.rstrip("@") and "parse" in reason:
            reason = "its credentials have characters that must be escaped, such as %2F for a slash"
        remedy = "check the URL and your credentials"
        if "Unrecognized" in reason:
            remedy = "known are s3://, gs://, abfs:// and hdfs://; fetch files from elsewhere to this host"
        raise DataError(f"{shown} cannot be opened: {reason}; {remedy}") from None
    root = root.rstrip("/")
    return Remote(files=files, path=f"{root}/{path}" if path else root, url=shown)


def join(place: Path | str, name: str) -> Path | str:
    """Return the place of a file or folder in a folder, which may be a URL with options."""
    if not is_url(place):
        return Path(place, name)
    folder, has_options, options = str(place).partition("?")
    return f"{folder.rstrip('/')}/{name}{has_options}{options}"


@contextlib.contextmanager
def _wrap_errors(remote: Remote, done: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = f"{remote} cannot be {done}: {first_line(error)}"
        raise DataError(f"{reason}; check the URL, your credentials and the network") from error
