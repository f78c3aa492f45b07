"""The ring run by maintenance, why a slot stays, and exact counts."""
from harness import wait_until


def test_smoke(db):
    s = db.session()
    s.sql("SELECT awa.enqueue_batch('q', ARRAY['1','2','3']::jsonb[])")
    print(s.sql("SELECT * FROM awa.queue_stats"))
    s.sql("SELECT awa_internal.seal()")
    s.sql("CALL awa.maintain()")
    for r in s.sql("SELECT * FROM awa.ring_status ORDER BY slot LIMIT 3"):
        print(r)
    s.sql("SELECT * FROM awa.complete(ARRAY(SELECT receipt FROM awa.claim('q', 9)))")
    s.sql("CALL awa.maintain()")
    print(s.sql("SELECT * FROM awa.queue_stats"))
    for r in s.sql("SELECT * FROM awa.ring_status ORDER BY slot LIMIT 3"):
        print(r)
    print(s.sql("SELECT * FROM awa_internal.slot_sums"), s.sql("SELECT * FROM awa_internal.finished_slots"))
