"""Who may do what: nothing is granted to anybody, EXECUTE on a verb is all that a caller needs, and nothing that somebody put
into the way is picked up by code that runs with the owner's rights."""

import psycopg
import pytest

from harness import wait_until

E = psycopg.errors

VERBS = [
    "SELECT awa.enqueue('q', '1')",
    "SELECT awa.enqueue_batch('q', ARRAY['1']::jsonb[])",
    "SELECT * FROM awa.enqueue_jobs('[{\"queue\": \"q\"}]')",
    "SELECT * FROM awa.claim('q')",
    "SELECT * FROM awa.claim_from(ARRAY['q'])",
    "SELECT * FROM awa.complete(ARRAY[70000])",
    "SELECT * FROM awa.release(ARRAY[70000])",
    "SELECT * FROM awa.cancel_claimed(ARRAY[70000])",
    "SELECT * FROM awa.complete_and_claim(ARRAY[70000], ARRAY['q'])",
    "SELECT awa.create_queue('r')",
    "SELECT awa.alter_queue('q', '{}')",
    "SELECT awa.pause_queue('q')",
    "SELECT awa.resume_queue('q')",
    "SELECT * FROM awa.job(1)",
    "CALL awa.maintain()",
]


@pytest.fixture
def role(db):
    """Makes login roles; they are dropped with what they own when the test has ended."""
    made = []

    def make(name, options="LOGIN"):
        db.sql(f"CREATE ROLE {name} {options}")
        made.append(name)
        return name

    yield make
    db.cluster.close_connections()
    for name in made:
        db.sql(f"DROP OWNED BY {name} CASCADE")
        db.sql(f"DROP ROLE {name}")


def grant_verbs(db, name):
    db.sql(f"GRANT USAGE ON SCHEMA awa TO {name}; GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa TO {name}")


# ------------------------------------------------------------------------------------------------- what is granted


def test_nothing_is_granted_to_anybody(db):
    owner = db.value("SELECT oid FROM pg_roles WHERE rolname = 'postgres'")
    granted = db.sql(
        """
        SELECT what, name, grantee, privilege_type FROM (
            SELECT 'schema' AS what, nspname::text AS name, (aclexplode(coalesce(nspacl, acldefault('n', nspowner)))).*
            FROM pg_namespace WHERE nspname IN ('awa', 'awa_internal')
            UNION ALL
            SELECT 'routine', oid::regprocedure::text, (aclexplode(coalesce(proacl, acldefault('f', proowner)))).*
            FROM pg_proc WHERE pronamespace IN ('awa'::regnamespace, 'awa_internal'::regnamespace)
            UNION ALL
            SELECT 'relation', oid::regclass::text,
                   (aclexplode(coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)))).*
            FROM pg_class WHERE relnamespace IN ('awa'::regnamespace, 'awa_internal'::regnamespace)
            AND relkind IN ('r', 'p', 'v', 'S')
        ) granted WHERE grantee <> %s
        """,
        [owner],
    )
    assert granted == []


def test_a_role_without_grants_can_do_nothing(db, role):
    name = role("nobody_here")
    db.sql("SELECT awa.enqueue('q', '1')")
    stranger = db.session(user=name)
    for verb in VERBS:
        with pytest.raises(E.InsufficientPrivilege):
            stranger.sql(verb)
    for schema in ("awa", "awa_internal"):
        assert not db.value("SELECT has_schema_privilege(%s, %s, 'USAGE')", [name, schema])
        assert not db.value("SELECT has_schema_privilege(%s, %s, 'CREATE')", [name, schema])
    # With USAGE on both schemas, which nobody has, each function and each relation still refuses by itself.
    routines = db.sql("SELECT oid, oid::regprocedure::text FROM pg_proc"
                      " WHERE pronamespace IN ('awa'::regnamespace, 'awa_internal'::regnamespace)")
    assert len(routines) > 40
    for oid, routine in routines:
        assert not db.value("SELECT has_function_privilege(%s, %s::oid, 'EXECUTE')", [name, oid]), routine
    relations = db.sql("SELECT oid::regclass::text, relkind FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'S')"
                       " AND relnamespace IN ('awa'::regnamespace, 'awa_internal'::regnamespace)")
    assert len(relations) > 70
    db.sql(f"GRANT USAGE ON SCHEMA awa, awa_internal TO {name}")
    for relation, kind in relations:
        if kind in (b"S", "S"):
            with pytest.raises(E.InsufficientPrivilege):
                stranger.sql("SELECT nextval(%s)", [relation])
        with pytest.raises(E.InsufficientPrivilege):
            stranger.sql(f"SELECT * FROM {relation}")
    for verb in [*VERBS, "SELECT awa_internal.seal()", "SELECT awa_internal.close(0)", 'SELECT awa_internal."empty"(0)',
                 "SELECT awa_internal.lane_state(1)"]:
        with pytest.raises(E.InsufficientPrivilege):
            stranger.sql(verb)


# ------------------------------------------------------------------------------------------------- what is needed


@pytest.mark.parametrize("preload", ["plain", "preload"])
def test_execute_on_the_verbs_is_enough(db, role, request, preload):
    database = db if preload == "plain" else request.getfixturevalue("preload_db")
    name = role("worker_bee") if preload == "plain" else "worker_bee"
    if preload == "preload":
        database.sql("CREATE ROLE worker_bee LOGIN")
    try:
        grant_verbs(database, name)
        s = database.session(user=name)
        # A queue by its first enqueue, and one by create_queue.
        assert s.value("SELECT awa.enqueue('by_enqueue', '{\"a\": 1}', metadata => '{}', tags => ARRAY['t'])") > 0
        assert s.value("SELECT awa.create_queue('made', '{\"shards\": 2}')") is True
        s.sql("SELECT awa.enqueue_batch('made', ARRAY['1', '2', '3']::jsonb[])")
        s.sql("SELECT * FROM awa.enqueue_jobs('[{\"queue\": \"third\"}, {\"queue\": \"made\"}]')")
        receipts = [r for (r,) in s.sql("SELECT receipt FROM awa.claim_from(ARRAY['made', 'by_enqueue', 'third'], 10)")]
        assert len(receipts) == 6
        states = []
        for verb, some in (("release", receipts[:2]), ("cancel_claimed", receipts[2:3]), ("complete", receipts[3:5])):
            states += [x for (x,) in s.sql(f"SELECT state FROM awa.{verb}(%s::int8[])", [some])]
        assert states == ["ready"] * 2 + ["cancelled"] + ["completed"] * 2
        got = s.sql("SELECT receipt FROM awa.complete_and_claim(%s::int8[], ARRAY['made', 'by_enqueue', 'third'], 10)",
                    [receipts[5:]])
        assert len(got) == 2
        assert s.value("SELECT awa.alter_queue('made', '{\"priority\": 1}')")["priority"] == 1
        assert s.value("SELECT awa.pause_queue('made')") is True
        assert database.sql("SELECT paused_by FROM awa.queues WHERE queue = 'made'") == [(name,)]
        assert s.value("SELECT awa.resume_queue('made')") is True
        # And still no right on any table.
        for (table,) in database.sql("SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'p')"
                                     " AND relnamespace = 'awa_internal'::regnamespace"):
            assert not database.value("SELECT has_table_privilege(%s, %s, 'SELECT')", [name, table])
        assert s.value("SELECT current_user") == name
        assert s.value("SHOW search_path") == '"$user", public'
    finally:
        if preload == "preload":
            s.close()
            database.sql("DROP OWNED BY worker_bee; DROP ROLE worker_bee")


def test_the_owner_need_not_be_a_superuser_and_maintenance_runs_as_the_owner(db, role):
    name = role("mere_owner", "LOGIN")
    db.sql("SELECT awa.enqueue('before', '1')")
    for kind, relation in db.sql(
        "SELECT CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, oid::regclass::text"
        " FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'S') AND relnamespace IN"
        " ('awa'::regnamespace, 'awa_internal'::regnamespace)"
    ):
        db.sql(f"ALTER {kind} {relation} OWNER TO {name}")
    db.sql(f"ALTER SCHEMA awa OWNER TO {name}; ALTER SCHEMA awa_internal OWNER TO {name}")
    db.sql(f"GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa, awa_internal TO {name}")
    try:
        user = role("plain_user")
        grant_verbs(db, user)
        s, owner = db.session(user=user), db.session(user=name)
        s.sql("SELECT awa.enqueue('after', '2')")
        receipts = [r for (r,) in s.sql("SELECT receipt FROM awa.claim_from(ARRAY['before', 'after'], 5)")]
        assert [x for (x,) in s.sql("SELECT state FROM awa.complete(%s::int8[])", [receipts])] == ["completed"] * 2
        s.sql("SELECT awa.alter_queue('after', '{\"retention\": \"0 s\"}')")
        s.sql("SELECT awa.alter_queue('before', '{\"retention\": \"0 s\"}')")
        owner.sql("SELECT awa_internal.seal()")

        def emptied():
            owner.sql("CALL awa.maintain()")
            return db.sql("SELECT event FROM awa_internal.ring WHERE slot = 0") == [("e",)]

        wait_until(emptied)
    finally:
        db.sql(f"REASSIGN OWNED BY {name} TO postgres")


def test_set_role_counts_at_each_call(db, role):
    grant_verbs(db, role("may"))
    role("may_not")
    s = db.session()
    s.sql("SET ROLE may")
    s.sql("SELECT awa.enqueue('q', '1')")
    s.sql("SET ROLE may_not")
    with pytest.raises(E.InsufficientPrivilege):
        s.sql("SELECT awa.enqueue('q', '2')")
    s.sql("SET ROLE may")
    assert s.sql("SELECT args FROM awa.claim('q', 5)") == [(1,)]
    s.sql("RESET ROLE")
    assert s.value("SELECT current_user") == "postgres"
    # The role is restored after an error inside the owner's part as well.
    s.sql("SET ROLE may")
    with pytest.raises(psycopg.Error):
        s.sql("SELECT awa.create_queue('x', '{\"lease\": \"soon\"}')")
    assert s.value("SELECT current_user") == "may"
    s.sql("BEGIN")
    s.sql("SAVEPOINT a")
    with pytest.raises(psycopg.Error):
        s.sql("SELECT awa.alter_queue('q', '{\"lease\": \"-1 s\"}')")
    s.sql("ROLLBACK TO a")
    assert s.value("SELECT current_user") == "may"
    with pytest.raises(E.InsufficientPrivilege):
        s.sql("SELECT 1 FROM awa_internal.queues")
    s.sql("ROLLBACK")


def test_functions_of_the_definer_see_the_definers_rights(db, role):
    grant_verbs(db, role("producer"))
    caller = role("caller")
    db.sql("CREATE FUNCTION public.put() RETURNS bigint LANGUAGE sql SECURITY DEFINER"
           " SET search_path = pg_catalog, pg_temp AS $$ SELECT awa.enqueue('q', '5') $$")
    db.sql("ALTER FUNCTION public.put() OWNER TO producer")
    s = db.session(user=caller)
    with pytest.raises(E.InsufficientPrivilege):
        s.sql("SELECT awa.enqueue('q', '4')")
    s.sql("SELECT public.put()")
    assert db.sql("SELECT args FROM awa.claim('q', 5)") == [(5,)]


def test_row_security_and_triggers_of_a_dba_on_mutable_tables(db, role):
    """row_security = off of the caller must not turn the owner's statements into errors."""
    name = role("carefree")
    grant_verbs(db, name)
    s = db.session(user=name, settings={"row_security": "off"})
    s.sql("SELECT awa.enqueue('q', '1')")
    s.sql("SELECT awa.alter_queue('q', '{\"priority\": 3}')")
    assert s.sql("SELECT args FROM awa.claim('q')") == [(1,)]


# ------------------------------------------------------------------------------------------------------- traps

TRAPS = """
CREATE SCHEMA trap;
CREATE TABLE trap.caught (who text, what text);
GRANT USAGE, CREATE ON SCHEMA trap TO PUBLIC;
GRANT ALL ON trap.caught TO PUBLIC;
CREATE FUNCTION trap.note(what text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO trap.caught VALUES (current_user, what); END $$;
CREATE FUNCTION trap.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('nextval'); RETURN 1; END $$;
CREATE FUNCTION trap.nextval(text) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('nextval'); RETURN 1; END $$;
CREATE FUNCTION trap.now() RETURNS timestamptz LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('now'); RETURN pg_catalog.now(); END $$;
CREATE FUNCTION trap.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('clock_timestamp'); RETURN pg_catalog.clock_timestamp(); END $$;
CREATE FUNCTION trap.gen_random_uuid() RETURNS uuid LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('gen_random_uuid'); RETURN pg_catalog.gen_random_uuid(); END $$;
CREATE FUNCTION trap.hashtextextended(text, bigint) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('hashtextextended'); RETURN 1; END $$;
CREATE FUNCTION trap.hashtextextended(text, int) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('hashtextextended'); RETURN 1; END $$;
CREATE FUNCTION trap.format(text, text) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('format'); RETURN pg_catalog.format($1, $2); END $$;
CREATE FUNCTION trap.format(text, int) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('format'); RETURN pg_catalog.format($1, $2); END $$;
CREATE FUNCTION trap.pg_extension_config_dump(text, text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('config_dump'); END $$;
CREATE FUNCTION trap.is_equal(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('='); RETURN true; END $$;
CREATE FUNCTION trap.is_equal(int, int) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('='); RETURN true; END $$;
CREATE FUNCTION trap.is_equal(smallint, smallint) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('='); RETURN true; END $$;
CREATE FUNCTION trap.is_equal(text, text) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM trap.note('='); RETURN true; END $$;
CREATE OPERATOR trap.= (FUNCTION = trap.is_equal, LEFTARG = bigint, RIGHTARG = bigint);
CREATE OPERATOR trap.= (FUNCTION = trap.is_equal, LEFTARG = int, RIGHTARG = int);
CREATE OPERATOR trap.= (FUNCTION = trap.is_equal, LEFTARG = smallint, RIGHTARG = smallint);
CREATE OPERATOR trap.= (FUNCTION = trap.is_equal, LEFTARG = text, RIGHTARG = text);
CREATE OPERATOR trap.|| (FUNCTION = pg_catalog.textcat, LEFTARG = text, RIGHTARG = text);
CREATE DOMAIN trap.jsonb AS pg_catalog.jsonb CHECK (false);
CREATE DOMAIN trap.interval AS pg_catalog.interval CHECK (false);
CREATE DOMAIN trap.text AS pg_catalog.text CHECK (false);
CREATE TABLE trap.queues (queue_id int, name pg_catalog.text);
CREATE TABLE trap.ring (event_no bigint, slot smallint);
CREATE TABLE trap.world (incarnation bigint);
"""


def test_a_hostile_search_path_of_a_caller(db, role):
    name = role("schemer")
    grant_verbs(db, name)
    db.sql(TRAPS)
    s = db.session(user=name)
    s.sql("SET search_path = trap, pg_temp, pg_catalog")
    for table in ("queues", "ring", "world", "lanes", "ready_0", "segments_0", "claims_0", "closures_0", "queue_totals"):
        s.sql(f"CREATE TEMP TABLE {table} (a pg_catalog.int4)")
    s.sql("CREATE TEMP SEQUENCE queue_ids; CREATE TEMP SEQUENCE entry_ids; CREATE TEMP SEQUENCE claim_blocks")
    s.sql("CREATE FUNCTION pg_temp.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint'")
    s.sql("SELECT awa.enqueue('q', '1'::pg_catalog.jsonb, metadata => '{}'::pg_catalog.jsonb)")
    s.sql("SELECT awa.create_queue('r', '{\"lease\": \"3 min\", \"shards\": 2}'::pg_catalog.jsonb)")
    s.sql("SELECT awa.alter_queue('r', '{\"retention\": \"0 s\"}'::pg_catalog.jsonb)")
    s.sql("SELECT awa.alter_queue('q', '{\"retention\": \"0 s\"}'::pg_catalog.jsonb)")
    s.sql("SELECT awa.pause_queue('r')")
    s.sql("SELECT awa.resume_queue('r')")
    receipt = s.value("SELECT receipt FROM awa.claim('q')")
    s.sql("SELECT * FROM awa.release(ARRAY[%s]::pg_catalog.int8[])", [receipt])
    receipt = s.value("SELECT receipt FROM awa.claim('q')")
    s.sql("SELECT * FROM awa.complete(ARRAY[%s]::pg_catalog.int8[])", [receipt])
    # An owner with such a path runs the maintenance.
    owner = db.session()
    owner.sql("SET search_path = trap, pg_temp, pg_catalog")
    owner.sql("CREATE TEMP TABLE ring (a pg_catalog.int4)")
    owner.sql("SELECT awa_internal.seal()")

    def emptied():
        owner.sql("CALL awa.maintain()")
        return db.sql("SELECT event FROM awa_internal.ring WHERE slot = 0") == [("e",)]

    wait_until(emptied)
    assert owner.value("SHOW search_path") == "trap, pg_temp, pg_catalog"
    assert db.sql("SELECT * FROM trap.caught") == []
    assert db.sql("SELECT name FROM awa_internal.queues ORDER BY 1") == [("q",), ("r",)]


@pytest.mark.parametrize("view", ["awa.jobs", "awa.queue_stats", "awa.queues", "awa.ring_status", "awa.job(1)"])
def test_a_hostile_search_path_of_a_reader(db, view):
    db.sql(TRAPS)
    db.sql("SELECT awa.enqueue('q', '1')")
    reader = db.session()
    reader.sql("SET search_path = trap, pg_temp, pg_catalog")
    reader.sql(f"SELECT * FROM {view}")
    assert db.sql("SELECT * FROM trap.caught") == []


def test_create_extension_under_a_hostile_search_path(cluster):
    db = cluster.database(extension=False)
    try:
        db.sql(TRAPS)
        installer = db.session()
        installer.sql("SET search_path = trap, pg_temp, pg_catalog, public")
        installer.sql("CREATE TEMP TABLE queues (a pg_catalog.int4)")
        installer.sql("CREATE EXTENSION awa_queue")
        assert db.sql("SELECT * FROM trap.caught") == []
        # Every type, default and column is the catalogue's.
        assert db.sql(
            "SELECT a.attrelid::regclass::text, attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " JOIN pg_type t ON t.oid = a.atttypid WHERE c.relnamespace = 'awa_internal'::regnamespace"
            " AND t.typnamespace = 'trap'::regnamespace") == []
        assert db.sql(
            "SELECT DISTINCT refobjid::regnamespace::text FROM pg_depend d WHERE refclassid = 'pg_namespace'::regclass"
            " AND objid IN (SELECT objid FROM pg_depend WHERE deptype = 'e' AND refclassid = 'pg_extension'::regclass)"
            " AND refobjid = 'trap'::regnamespace") == []
        db.sql("SELECT awa.enqueue('q', '1')")
        assert db.sql("SELECT args FROM awa.claim('q')") == [(1,)]
    finally:
        db.drop()


@pytest.mark.parametrize("planted", ["awa", "awa_internal"])
def test_a_schema_that_somebody_planted_stops_the_install(cluster, planted):
    db = cluster.database(extension=False)
    try:
        db.sql("CREATE ROLE planter LOGIN")
        db.sql(f"GRANT CREATE ON DATABASE {db.name} TO planter")
        p = db.session(user="planter")
        p.sql(f"CREATE SCHEMA {planted}")
        p.sql(f"CREATE TABLE {planted}.queues (queue_id int)")
        p.sql(f"CREATE FUNCTION {planted}.enqueue(text, jsonb) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'")
        p.close()
        for statement in ("CREATE EXTENSION awa_queue", "CREATE EXTENSION awa_queue CASCADE"):
            with pytest.raises(E.DuplicateSchema):
                db.sql(statement)
        assert db.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'awa%'") == [(planted,)]
        assert db.sql("SELECT 1 FROM pg_extension WHERE extname = 'awa_queue'") == []
        db.sql(f"DROP SCHEMA {planted} CASCADE")
        db.sql("CREATE EXTENSION awa_queue")
        db.sql("SELECT awa.enqueue('q', '1')")
    finally:
        db.sql("DROP OWNED BY planter CASCADE; DROP ROLE planter")
        db.drop()


def test_the_extension_is_not_to_be_moved(db):
    with pytest.raises(psycopg.Error):
        db.sql("ALTER EXTENSION awa_queue SET SCHEMA public")
    other = db.cluster.database(extension=False)
    try:
        with pytest.raises(psycopg.Error):
            other.sql("CREATE SCHEMA elsewhere; CREATE EXTENSION awa_queue SCHEMA elsewhere")
    finally:
        other.drop()


def test_only_a_superuser_installs(cluster, role, db):
    name = role("hopeful")
    db.sql(f"GRANT CREATE ON DATABASE {db.name} TO {name}")
    db.sql("DROP EXTENSION awa_queue")
    with pytest.raises(E.InsufficientPrivilege):
        db.session(user=name).sql("CREATE EXTENSION awa_queue")


def test_payloads_are_in_no_message(db):
    secret = "tell-nobody"
    for statement in (
        f"SELECT awa.enqueue('q', '\"{secret}\"', priority => 9)",
        f"SELECT awa.enqueue('q', '\"{secret}\"', options => '{{\"a\": 1}}')",
        f"SELECT awa.enqueue_batch('q', ARRAY['\"{secret}\"', NULL]::jsonb[])",
        f"SELECT awa.enqueue('q', to_jsonb(repeat('{secret}', 200000)))",
    ):
        with pytest.raises(psycopg.Error) as refused:
            db.sql(statement)
        diag = refused.value.diag
        assert secret not in f"{diag.message_primary} {diag.message_detail} {diag.message_hint}"
