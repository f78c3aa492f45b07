"""Where test servers keep their data: in memory where there is room. A database with the extension is some thousand small files,
and a test gets one of its own; no test is about the disk, and a killed server loses there what it loses with fsync off."""

import os
import shutil
import tempfile

MEMORY = "/dev/shm"
# Bytes: what the servers of two majors side by side may take, WAL included.
ROOM = 8 << 30


def prefer_memory():
    """For this process and those it starts, unless TMPDIR says where."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"] = MEMORY
        tempfile.tempdir = None
