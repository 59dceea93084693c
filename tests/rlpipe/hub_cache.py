"""A local cache of the Hugging Face hub, laid out as huggingface_hub leaves it."""

import hashlib
from pathlib import Path


def add_to_hub_cache(home: Path, repository: str, source: Path, branch: str = "main", keep: str = "*") -> str:
    """Put the files of `source` into the cache below HF_HOME `home`, as `repository`; returns the commit."""
    commit = hashlib.sha1(f"{repository} {branch}".encode()).hexdigest()
    cache = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = cache / "snapshots" / commit
    for folder in (cache / "refs", cache / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (cache / "refs" / branch).write_text(commit)
    for file in source.glob(keep):
        content = file.read_bytes()
        blob = cache / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return commit
