"""Bodies of jobs come out as they went in: through claim, release, a slot that was emptied meanwhile, and other tables' TOAST.

Compared as text: jsonb keeps 1.10 apart from 1.1, and a driver's float would hide it.
"""

import json

import psycopg
import pytest

from harness import wait_until

E = psycopg.errors

BODIES = {
    "a decimal keeps its zeros": '{"price": 1.10, "zero": 0.000, "minus": -0.0}',
    "beyond a double": '[1e400, 1e-400, 123456789012345678901234567890, 0.1234567890123456789012345678901]',
    "twenty digits": "12345678901234567890",
    "the ends of bigint and one beyond": "[9223372036854775807, 9223372036854775808, -9223372036854775809]",
    "unicode": r'{"escape": "\u00e4\ud83d\ude00\u2028", "raw": "äöü 😀 中文", "del": "\u007f\u0001"}',
    "what JSON escapes": r'"quote \" backslash \\ slash / newline \n tab \t"',
    "keys": '{"": 1, "b": 2, "aa": 3, "a": {"a": {"a": [[[]]]}}}',
    "null": "null",
    "true": "true",
    "an empty array": "[]",
    "an empty object": "{}",
    "an empty string": '""',
    "SQL": """{"x": "'; DROP TABLE jobs; --", "y": "%s $1 {} \\\\"}""",
}


def put(session, body, **parameters):
    names = "".join(f", {name} => %s" for name in parameters)
    return session.value(f"SELECT awa.enqueue('q', %s::jsonb{names})", [body, *parameters.values()])


def as_text(db, body):
    """The text that PostgreSQL gives for a body."""
    return db.value("SELECT %s::jsonb::text", [body])


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_body_goes_through_claim_release_and_claim(db, body):
    s = db.session()
    wanted = as_text(db, body)
    put(s, body)
    # As metadata too, which lies in the row's composite column; and in a batch and by enqueue_jobs.
    put(s, "1", metadata=body, tags=["a", "ä'\"\\,{}", ""], ordering_key="key 'of' \"this\"")
    s.sql("SELECT awa.enqueue_batch('q', ARRAY[%s, %s]::jsonb[])", [body, body])
    s.sql("SELECT * FROM awa.enqueue_jobs(jsonb_build_array(jsonb_build_object('queue', 'q', 'args', %s::jsonb,"
          " 'metadata', %s::jsonb)))", [body, body])
    query = "SELECT receipt, args::text, metadata::text, tags, ordering_key FROM awa.claim('q', 10)"
    for _ in range(2):
        rows = s.sql(query)
        assert [r[1] for r in rows] == [wanted, "1", wanted, wanted, wanted]
        assert rows[1][2:] == (wanted, ["a", "ä'\"\\,{}", ""], "key 'of' \"this\"")
        assert rows[4][2] == (None if wanted == "null" else wanted)
        s.sql("SELECT * FROM awa.release(%s::int8[])", [[r[0] for r in rows]])


def test_a_null_byte_is_refused_by_postgresql_as_ever(db):
    with pytest.raises(E.UntranslatableCharacter):
        put(db, r'"\u0000"')


# -------------------------------------------------------------------------------------------------- large bodies


def random_text(db, bytes_):
    """Text that does not compress."""
    return db.value(
        "SELECT string_agg(md5(random()::text || n), '') FROM generate_series(1, %s) n", [(bytes_ + 31) // 32]
    )[:bytes_]


def size_of(db, body):
    return db.value("SELECT pg_column_size(%s::jsonb)", [body])


def test_the_limit_of_a_mebibyte(db):
    s = db.session()
    limit = 1024 * 1024
    overhead = size_of(db, json.dumps("x" * 200)) - 200
    whole = json.dumps(random_text(db, limit - overhead))
    put(s, whole)
    with pytest.raises(E.ProgramLimitExceeded) as refused:
        put(s, json.dumps("y" * (limit + 10)))
    assert refused.value.diag.message_hint and "yyy" not in str(refused.value)
    # What counts is the value, not how small it is when compressed; also where it comes compressed from a table.
    s.sql("CREATE TEMP TABLE large (body jsonb)")
    s.sql("INSERT INTO large VALUES (to_jsonb(repeat('z', %s)))", [limit + 10])
    assert s.value("SELECT pg_column_size(body) FROM large") < limit
    with pytest.raises(E.ProgramLimitExceeded):
        s.sql("SELECT awa.enqueue('q', body) FROM large")
    with pytest.raises(E.ProgramLimitExceeded):
        s.sql("SELECT awa.enqueue_batch('q', ARRAY['1', body]) FROM large")
    assert db.value("SELECT count(*) FROM awa_internal.ready") == 1
    s.sql("SELECT awa.alter_queue('q', '{\"max_args_bytes\": 2000000}')")
    s.sql("SELECT awa.enqueue('q', body) FROM large")
    assert s.value("SELECT args::text FROM awa.claim('q')") == whole
    assert s.value("SELECT args = (SELECT body FROM large) FROM awa.claim('q')")


SIZES = [1_900, 2_100, 8_100, 100_000, 700_000]


@pytest.mark.parametrize("kind", ["random", "compressible"])
def test_toasted_bodies_through_claim_release_and_emptying(db, kind):
    """Rule 23: the values that a claim, a release or a reader returned stay right after the slot was emptied."""
    s, holder = db.session(), db.session()
    bodies = []
    for i, size in enumerate(SIZES):
        text = random_text(db, size) if kind == "random" else "abc" * (size // 3)
        bodies.append(json.dumps({"i": i, "text": text}))
    wanted = [as_text(db, b) for b in bodies]
    for b in bodies:
        put(s, b, metadata=b)
    if kind == "random":
        assert db.value("SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE relname = 'ready_0'") > 0
    rows = s.sql("SELECT receipt, args::text, metadata::text FROM awa.claim('q', 10)")
    assert [r[1] for r in rows] == wanted and [r[2] for r in rows] == wanted
    # Released bodies are copied into another slot; theirs is emptied.
    s.sql("SELECT awa_internal.seal()")
    assert [x for (x,) in s.sql("SELECT state FROM awa.release(%s::int8[])", [[r[0] for r in rows]])] == ["ready"] * 5
    assert s.value("SELECT awa_internal.close(0)") == "closed"
    wait_until(lambda: s.value('SELECT awa_internal."empty"(0, true)') == "emptied")
    # What a claim's and a reader's rows hold must be whole without the slot: kept in a table and in open cursors, read
    # after the slot was emptied and filled anew.
    holder.sql("CREATE TABLE kept AS SELECT receipt, args, metadata FROM awa.claim('q', 10)")
    holder.sql("BEGIN")
    holder.sql("DECLARE seen CURSOR WITH HOLD FOR SELECT args, metadata FROM awa.jobs ORDER BY args->'i'")
    holder.sql("COMMIT")
    s.sql("SELECT * FROM awa.complete(ARRAY(SELECT receipt FROM kept))")
    s.sql("SELECT awa_internal.seal()")
    slot = 1
    assert s.value("SELECT awa_internal.close(%s)", [slot]) == "closed"
    wait_until(lambda: s.value('SELECT awa_internal."empty"(%s, true)', [slot]) == "emptied")
    for b in reversed(bodies):
        put(s, b.replace("a", "Z"))
    assert [r[0] for r in holder.sql("SELECT args::text FROM kept ORDER BY args->'i'")] == wanted
    assert [r[0] for r in holder.sql("SELECT metadata::text FROM kept ORDER BY args->'i'")] == wanted
    fetched = holder.sql("FETCH ALL FROM seen")
    assert len(fetched) == 5
    for (args, metadata), text in zip(fetched, wanted):
        assert args == json.loads(text) and metadata == json.loads(text)


def test_a_row_kept_in_a_variable_outlives_its_table(db):
    """What a row holds must not point into the slot's TOAST: the same transaction truncates it under the variable."""
    s = db.session()
    body = json.dumps({"text": random_text(db, 50_000)})
    put(s, body)
    s.sql(
        "CREATE FUNCTION keep() RETURNS TABLE (claimed text, read text) LANGUAGE plpgsql AS $$"
        " DECLARE job record; seen record; BEGIN"
        " SELECT * INTO job FROM awa.claim('q');"
        " SELECT * INTO seen FROM awa.job(job.job_id);"
        " PERFORM awa.complete(ARRAY[job.receipt]);"
        " TRUNCATE awa_internal.ready_0;"
        " RETURN QUERY SELECT md5(job.args::text), md5(seen.args::text); END $$"
    )
    md5 = s.value("SELECT md5(%s::jsonb::text)", [body])
    assert s.sql("SELECT * FROM keep()") == [(md5, md5)]


def test_bodies_that_come_from_another_tables_toast(db):
    s = db.session()
    s.sql("CREATE TABLE source (i int, body jsonb, note text, labels text[])")
    s.sql("ALTER TABLE source ALTER body SET STORAGE EXTERNAL")
    text = random_text(db, 30_000)
    s.sql(
        "INSERT INTO source SELECT i, jsonb_build_object('i', i, 'text', %s::text),"
        " repeat(md5(i::text), 5), ARRAY[repeat(md5(i::text), 200)] FROM generate_series(1, 4) i", [text]
    )
    assert s.value("SELECT pg_relation_size(reltoastrelid) > 0 FROM pg_class WHERE oid = 'source'::regclass")
    s.sql("SELECT awa.enqueue('q', body, metadata => body, ordering_key => note, tags => labels) FROM source WHERE i = 1")
    s.sql("SELECT awa.enqueue_batch('q', array_agg(body ORDER BY i), metadata => (SELECT body FROM source WHERE i = 2))"
          " FROM source WHERE i > 1")
    # The source and its TOAST go, and their space is used by others.
    s.sql("DROP TABLE source")
    s.sql("CREATE TABLE other AS SELECT %s::text AS t FROM generate_series(1, 20)", [random_text(db, 30_000)])
    rows = s.sql("SELECT args, metadata, ordering_key, tags FROM awa.claim('q', 10)")
    assert [r[0] for r in rows] == [{"i": i, "text": text} for i in (1, 2, 3, 4)]
    assert [r[1]["i"] for r in rows] == [1, 2, 2, 2]
    assert {r[1]["text"] for r in rows} == {text}
    md5 = s.value("SELECT md5('1')")
    assert rows[0][2:] == (md5 * 5, [md5 * 200])


# The servers of the other majors come without lz4.
@pytest.mark.parametrize("setting", ["pglz", pytest.param("lz4", marks=pytest.mark.majors(15))])
def test_compression_of_the_column_may_be_changed(db, setting):
    db.sql(f"ALTER TABLE awa_internal.ready_0 ALTER args SET COMPRESSION {setting}")
    s = db.session()
    body = json.dumps({"text": "abc" * 20_000})
    put(s, body)
    put(s, body)
    assert db.value("SELECT DISTINCT pg_column_compression(args) FROM awa_internal.ready_0") == setting
    assert s.sql("SELECT args::text FROM awa.claim('q', 2)") == [(as_text(db, body),)] * 2


def test_many_columns_of_the_rest_survive_a_release_into_another_slot(db):
    s = db.session()
    put(s, '{"a": 1.10}', metadata='{"m": 1.10}', tags=["x"], ordering_key="k", max_attempts=7, priority=1)
    before = s.sql("SELECT receipt, job_id, args::text, metadata::text, tags, ordering_key, max_attempts, priority, attempt,"
                   " enqueued_at FROM awa.claim('q')")[0]
    s.sql("SELECT awa_internal.seal()")
    s.sql("SELECT * FROM awa.release(ARRAY[%s]::int8[])", [before[0]])
    after = s.sql("SELECT receipt, job_id, args::text, metadata::text, tags, ordering_key, max_attempts, priority, attempt,"
                  " enqueued_at FROM awa.claim('q')")[0]
    assert after[1:] == before[1:] and after[0] != before[0]
