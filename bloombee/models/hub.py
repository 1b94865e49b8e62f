"""Files of a model on the Hugging Face hub: fetched one by one, as they are asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import tqdm

from bloombee.config.directories import cache_directory
from bloombee.errors import ModelError
from bloombee.models.cache_folder import write_atomically
from bloombee.models.files import ModelFiles
from bloombee.models.hashing import sha256_of

log = logging.getLogger(__name__)

METADATA = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
HUB_ERRORS = (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
    httpx2.HTTPError,
    OSError,
)


class _NoBar(tqdm):
    """Takes the place of the hub's progress bar where none is wanted."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


class HubFiles(ModelFiles):
    """A repository on the hub at one revision, kept in the hub's own cache folder."""

    def __init__(
        self, repo: str, *, revision: str | None = None, cache_dir: Path | None = None
    ) -> None:
        self._repo = repo
        self._revision = revision
        self._cache_dir = cache_dir
        self.name = repo if revision is None else f"{repo}@{revision}"

    def metadata(self) -> Path:
        return self._snapshot

    def names(self) -> Collection[str]:
        return self._remote_sha256.keys()

    def fetch(self, names: Collection[str], *, progress: bool) -> None:
        if all(self.path(name).is_file() for name in names):
            return
        self._download(tuple(names), self._commit, progress=progress)
        missing = [name for name in names if not self.path(name).is_file()]
        if missing:
            raise ModelError(
                f"{self.name}: {', '.join(missing)} could not be downloaded: "
                "check the network, or the repository's file list"
            )

    def path(self, name: str) -> Path:
        return self._snapshot / name

    def sha256(self, names: Collection[str]) -> dict[str, str]:
        here = {name: self.path(name) for name in names if self.path(name).is_file()}
        digests = sha256_of(here)
        for name in sorted(set(names) - set(here)):
            digest = self._remote_sha256.get(name)
            if digest is None:
                raise ModelError(
                    f"{self.name}: the hub gives no hash of {name}: "
                    "check the repository's file list, or download the model and give its folder"
                )
            digests[name] = digest
        return digests

    @property
    def _commit(self) -> str:
        """The commit that the revision resolved to: the cache names snapshots by it."""
        return self._snapshot.name

    @cached_property
    def _snapshot(self) -> Path:
        folder = self._download(METADATA, self._revision, progress=False)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{self.name} has no config.json: name a transformers model")
        return folder

    @cached_property
    def _remote_sha256(self) -> dict[str, str | None]:
        """SHA-256 by file name (None for small files), kept so that it is there offline too."""
        owner, _, repo = self._repo.rpartition("/")
        record = cache_directory() / "hub" / owner / repo / f"{self._commit}.json"
        if record.is_file():
            return dict(json.loads(record.read_text()))
        try:
            found = HfApi().model_info(self._repo, revision=self._commit, files_metadata=True)
        except HUB_ERRORS as error:
            raise _explained(error, self.name) from None
        digests = {
            entry.rfilename: entry.lfs.sha256 if entry.lfs else None
            for entry in found.siblings or ()
        }
        write_atomically(record, json.dumps(digests))
        return digests

    def _download(self, patterns: tuple[str, ...], revision: str | None, *, progress: bool) -> Path:
        try:
            folder = snapshot_download(
                self._repo,
                revision=revision,
                cache_dir=self._cache_dir,
                allow_patterns=list(patterns),
                tqdm_class=tqdm if progress else _NoBar,
            )
        except HUB_ERRORS as error:
            raise _explained(error, self.name) from None
        return Path(folder)


def _explained(error: Exception, name: str) -> ModelError:
    """What went wrong at the hub, and what to do about it, in one line."""
    if isinstance(error, GatedRepoError):
        text = f"{name} is gated: accept its licence on huggingface.co, then run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        text = (
            f"{name} is neither a path here nor a model on the hub that you may read: "
            "check the spelling, or run `hf auth login` if it is private"
        )
    elif isinstance(error, RevisionNotFoundError | RevisionResolutionError):
        text = f"{name}: the hub has no such revision: check --revision"
    elif isinstance(error, HFValidationError):
        text = f"{name!r} is neither a path here nor a hub id: a hub id looks like owner/model"
    elif isinstance(error, OfflineModeIsEnabled):
        text = f"{name} is not on this machine and HF_HUB_OFFLINE is set: unset it, or give a path"
    elif isinstance(error, LocalEntryNotFoundError | httpx2.HTTPError | ConnectionError):
        text = (
            f"{name} is not on this machine and the hub can't be reached: "
            "check the network, or give the path of a model folder"
        )
    else:
        reason = " ".join(str(error).split())[:200]
        text = f"{name} can't be read from the hub: {reason}: try again later"
    log.debug("hub: %s", name, exc_info=error)
    return ModelError(text)
