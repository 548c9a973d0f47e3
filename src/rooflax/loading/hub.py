"""Locates a model: a folder, a GGUF file, an installed package's, or a download from the Hugging
Face hub.

Downloads root-level safetensors, JSON and tokenizer files, or the GGUF files of one quantization
(`owner/name:Q4_K_M`), nothing else: no pickle, no code, no copies in subfolders; or, to `inspect`
them, config.json and the headers of these files.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.checkpoint import INDEX_FILE, WEIGHTS_FILE, Checkpoint, read_index
from rooflax.loading.gguf import model_files, open_gguf
from rooflax.loading.json_files import MAX_FILE_BYTES
from rooflax.loading.packages import PREFIX, package_file
from rooflax.loading.remote import (
    Session,
    copy_gguf_header,
    copy_gguf_url,
    copy_safetensors_header,
    shown,
)

ALLOW_PATTERNS = (
    "*.safetensors",
    "*.json",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
)
# In these patterns `*` matches `/` too, so subfolders need a rule of their own: of them only the
# modules of sentence-transformers are wanted, such as 1_Pooling/config.json.
IGNORE_PATTERNS = ("[!0-9]*/*", "[0-9][!_]*/*", "*/*/*")
CONFIGURATION = frozenset(("config.json", "generation_config.json", INDEX_FILE))
"""Small files that `headers` reads."""
ANSWERED_S = 20
"""Seconds in which the hub begins to answer."""
UNREACHED = {"ConnectError", "ConnectTimeout", "ConnectionError"}
"""Errors of the HTTP libraries that versions of huggingface_hub have had."""
AT_ONCE = 8
"""Weight files whose headers are read at the same time."""
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+)(:(?P<quantization>[A-Za-z0-9._/-]+))?"
)


def resolve(model: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """The local folder (or GGUF file) of a model, downloaded into the hub's cache if need be.

    Args:
        model: an existing folder or .gguf file, "package:NAME", or a hub id (`owner/name`), of GGUF
            files with the quantization or the file's name (`owner/name:Q4_K_M`).
        revision: branch, tag or commit of a hub id.
        offline: use the cache only; HF_HUB_OFFLINE=1 in the environment does the same.

    Raises:
        CheckpointError: nothing there, no such repository or revision, no access, not cached
            while offline, or no file or several of that quantization.
        OSError: the disk is full.
    """
    if not model:
        raise CheckpointError("no model was named: give a folder or a hub id (owner/name)")
    packaged = model.startswith(PREFIX)
    path = package_file(model) if packaged else Path(os.path.expanduser(model))
    # os.path.exists, unlike Path.exists, is false for names that no file can have.
    if os.path.exists(path):
        if revision is not None:
            raise CheckpointError(f"a revision ({revision}) is for hub ids, but {model} is local")
        if path.is_dir():
            return path
        if not path.is_file():
            raise CheckpointError(f"{model} is neither a folder nor a regular file.")
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(
            f"{model} is a file; give the folder of the checkpoint, or a .gguf file"
        )
    named = _HUB_ID.fullmatch(model)
    _reject_address(model)
    if not named:
        raise CheckpointError(
            f"no such folder or file: {model} (a model on the hub is given as owner/name, such as "
            "Qwen/Qwen2.5-0.5B)"
        )
    from huggingface_hub import constants

    repo = _Repository(named["repo"], revision, offline or constants.HF_HUB_OFFLINE)
    if named["quantization"]:
        first, parts = repo.gguf(named["quantization"])
        return repo.download([glob.escape(part) for part in parts]) / first
    folder = repo.download(ALLOW_PATTERNS, IGNORE_PATTERNS)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        repo.reject_unnamed(repo.names())
    return folder


def _reject_address(model: str) -> None:
    of_hub = re.match(r"(?:https?://)?(?:huggingface|hf)\.co/([^/]+/[^/?#]+)", model)
    if of_hub:
        raise CheckpointError(f"a model of the hub is named as owner/name, here {of_hub[1]}.")


@contextlib.contextmanager
def headers(
    model: str, *, revision: str | None = None, offline: bool = False
) -> Iterator[Path | None]:
    """A folder (or GGUF file) with a remote model's configuration and the headers of its weights,
    which `model_info` reads like the whole model; it goes at the end.

    Args:
        model: as for `resolve`, or the URL of a .gguf file.

    Yields:
        the cache's copy where that is whole; None where the model is no hub id, or may only be
        looked for here.

    Raises:
        CheckpointError: they cannot be read, in one sentence.
    """
    named, is_url = _HUB_ID.fullmatch(model), model.startswith(("http://", "https://"))
    is_here = os.path.exists(os.path.expanduser(model))
    if is_url and (offline or revision is not None):
        raise CheckpointError(f"{model:.200} is a URL, which has no revision and is not cached.")
    if is_url and "/resolve/" not in model:
        _reject_address(model)
    if is_here or not (is_url or named) or offline:
        yield None
        return
    place = shown(model).rpartition("/")[0] if is_url else model.partition(":")[0]
    with (
        tempfile.TemporaryDirectory(prefix="rooflax-headers-") as name,
        _said_of(place, instead_of=name),
    ):
        if is_url:
            yield copy_gguf_url(Session(), model, Path(name))
            return
        assert named is not None
        from huggingface_hub import constants, get_token

        repo = _Repository(named["repo"], revision, constants.HF_HUB_OFFLINE)
        quantization = named["quantization"]
        here = repo.cached(quantization)
        if here is None and not repo.offline:
            here = repo.headers(Session(get_token()), quantization, Path(name))
        yield here


@contextlib.contextmanager
def _said_of(place: str, instead_of: str) -> Iterator[None]:
    """Errors name the place of the files, instead of the folder of their copies."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        if instead_of not in str(error):
            raise
        raise type(error)(str(error).replace(instead_of, place)) from None


@dataclass(frozen=True)
class _Repository:
    """A repository of the hub, or its copy in the cache if that is all that may be used."""

    id: str
    revision: str | None
    offline: bool

    def download(self, allowed: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """The folder with the files of these patterns."""
        import huggingface_hub

        with self._errors(), _progress_bars():
            return Path(
                huggingface_hub.snapshot_download(
                    self.id,
                    revision=self.revision,
                    local_files_only=self.offline,
                    allow_patterns=list(allowed),
                    ignore_patterns=list(ignored),
                )
            )

    def names(self) -> list[str]:
        """The paths of its files."""
        import huggingface_hub

        if self.offline:
            return self._cached_names()
        with self._errors():
            # One request that is not tried again: listing files takes half a minute offline.
            about = huggingface_hub.HfApi().model_info(
                self.id, revision=self.revision, timeout=ANSWERED_S
            )
        names = [file.rfilename for file in about.siblings or ()]
        # A name that leads out of the folder is none of a repository's files.
        return [name for name in names if not {"", ".", ".."} & set(re.split(r"[/\\]", name))]

    def _cached_names(self) -> list[str]:
        wanted = self.revision or "main"
        for repo in cached_models():
            for revision in repo.revisions if repo.repo_id == self.id else ():
                if revision.commit_hash.startswith(wanted) or wanted in revision.refs:
                    files = (file.file_path for file in revision.files)
                    return [path.relative_to(revision.snapshot_path).as_posix() for path in files]
        self.download(["*.gguf"])  # which says that nothing is there
        return []

    def cached(self, quantization: str | None) -> Path | None:
        """Path of the cached copy, if it is complete."""
        there = replace(self, offline=True)
        try:
            if quantization:
                first, parts = there.gguf(quantization)
                path = there.download([glob.escape(part) for part in parts]) / first
                open_gguf(path)
                return path
            folder = there.download(ALLOW_PATTERNS, IGNORE_PATTERNS)
            Checkpoint(folder)
        except CheckpointError:
            return None
        return folder

    def headers(self, session: Session, quantization: str | None, folder: Path) -> Path:
        """The headers of its weight files, and its configuration, in a folder."""
        import huggingface_hub

        def url(name: str) -> str:
            return huggingface_hub.hf_hub_url(self.id, name, revision=self.revision)

        names = self.names()
        if quantization:
            first, parts = self.gguf(quantization)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda n: copy_gguf_header(session, url(n), folder / n), parts))
            return folder / first
        if not any(name.endswith(".safetensors") for name in names):
            self.reject_unnamed(names)
        for name in sorted(CONFIGURATION.intersection(names)):
            (folder / name).write_bytes(session.whole(url(name), MAX_FILE_BYTES))
        shards = [WEIGHTS_FILE] if WEIGHTS_FILE in names else []
        if not shards and INDEX_FILE in names:
            shards = sorted(set(read_index(folder / INDEX_FILE).values()).intersection(names))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda n: copy_safetensors_header(session, url(n), folder / n), shards))
        return folder

    def reject_unnamed(self, names: Iterable[str]) -> None:
        """
        Raises:
            CheckpointError: there are GGUF files, of which none was named.
        """
        files = model_files(names)
        if files:
            raise CheckpointError(
                f"{self.id} holds GGUF files: {_shown(files)}; name one by its quantization or its "
                f"name, as in {self.id}:{next(iter(files))}."
            )

    def gguf(self, quantization: str) -> tuple[str, list[str]]:
        """The file of a quantization, or the first of its parts; and all of them."""
        every = model_files(self.names())
        matching = {name: parts for name, parts in every.items() if _is_of(name, quantization)}
        matching = {quantization: every[quantization]} if quantization in every else matching
        if len(matching) != 1:
            matches = f"{len(matching)} models" if matching else "no GGUF file"
            raise CheckpointError(
                f"{self.id} has {matches} of {quantization:.80}; it has "
                f"{_shown(matching or every) or 'none at all'}"
                f"{', of which one can be given by its name' if matching else ''}."
            )
        ((first, parts),) = matching.items()
        return first, parts

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CheckpointError(_reason(error, self.id, self.revision)) from error


def _is_of(name: str, quantization: str) -> bool:
    """Whether a file's name, or its folder's, has the quantization as a word of its own."""
    word = rf"(^|[-./_]){re.escape(quantization.lower())}($|[-./])"
    return re.search(word, name.lower().removesuffix(".gguf")) is not None


def _shown(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:8])}{' ...' if listed[8:] else ''}"


@contextlib.contextmanager
def _progress_bars():
    """Shows progress bars on a terminal only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    if (sys.stderr is not None and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
    else:
        with disable_progress_bars():
            yield


def _reason(error: Exception, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id} and log in "
            "with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder and no hub model {repo_id} that you may read: check the name, or "
            "log in with `hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision}"
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id} is neither a folder nor a valid hub id (owner/name)"
    is_unreached = UNREACHED & {base.__name__ for base in type(error).__mro__}
    absent = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled
    if is_unreached or isinstance(error, absent):
        return (
            f"there is no folder {repo_id}, and the hub's {repo_id}{at} is not (completely) in the "
            "local cache and the hub is not reached: go online once to download it"
        )
    summary = " ".join(str(error).split())[:200] or type(error).__name__
    return f"downloading {repo_id}{at} failed: {summary}"


def cached_models() -> list[Any]:
    """The models in the hub's cache, by name, as huggingface_hub describes them."""
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = _scan().repos
    except CacheNotFound:
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda repo: repo.repo_id)


def remove(repo_id: str) -> int:
    """Removes all revisions of a model from the hub's cache.

    Args:
        repo_id: `owner/name`.

    Returns:
        the bytes that became free.

    Raises:
        CheckpointError: the cache has no such model.
    """
    for repo in cached_models():
        if repo.repo_id == repo_id:
            commits = [revision.commit_hash for revision in repo.revisions]
            strategy = _scan().delete_revisions(*commits)
            strategy.execute()
            return strategy.expected_freed_size
    raise CheckpointError(f"{repo_id} is not among the downloaded models")


def _scan() -> Any:
    import huggingface_hub

    return huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE)
