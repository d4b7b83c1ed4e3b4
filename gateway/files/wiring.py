"""Opens the file store of one process; what is opened is pushed on the caller's stack."""

from __future__ import annotations

from gateway.files.contents import Contents, PostgresContents
from gateway.files.sealing import PURPOSE
from gateway.files.store import FileStore
from gateway.resources import Resources
from gateway.secret import Cipher
from gateway.settings.load import Settings, read_secret


def open_files(settings: Settings, resources: Resources) -> FileStore:
    """Open the file store. Raises: SettingsError, where a credential of it is missing."""
    db, system_db = resources.db, resources.system_db
    cipher = Cipher(resources.secret, PURPOSE)
    rows = PostgresContents(db, cipher)
    elsewhere = open_s3(settings, resources)
    files = FileStore(
        db=db,
        system_db=system_db,
        contents=elsewhere or rows,
        cipher=cipher,
        others=() if elsewhere is None else (rows,),
        max_file_bytes=settings.max_file_bytes,
        max_org_bytes=settings.max_org_file_bytes,
    )
    files.start()
    resources.stack.push_async_callback(files.close)
    return files


def open_s3(settings: Settings, resources: Resources) -> Contents | None:
    stack, config = resources.stack, settings.file_store
    if config is None:
        return None
    from gateway.files.s3_contents import S3Contents  # loads obstore: who has no store,
    from gateway.files.strays import Strays  # and its bucket, needs neither

    contents = S3Contents(
        config,
        access_key=read_secret(config.access_key_env, "file_store.access_key_env"),
        secret_key=read_secret(config.secret_key_env, "file_store.secret_key_env"),
        cipher=Cipher(resources.secret, PURPOSE),
    )
    stack.callback(contents.close)
    strays = Strays(resources.system_db, contents)
    strays.start()
    stack.push_async_callback(strays.stop)
    return contents
