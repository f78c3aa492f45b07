-- create_queue, alter_queue, pause_queue, resume_queue.
SELECT awa.create_queue('u.one');
SELECT awa.create_queue('u.one', '{"priority": 1}') AS nothing_changed;
SELECT awa.create_queue(queue => 'u.all', settings => '{"shards": 4, "ordering": "strict", "priority": 1, "max_attempts": 7, "lease": "10 s",
    "retention": "2 d", "aging_interval": "30 s", "max_args_bytes": 2000, "failed_retention": "30 d", "dead_letters": false,
    "backoff": {"base": "5 s", "jitter": 0}, "description": "all that is built"}');
SELECT jsonb_pretty(awa.alter_queue('u.one', '{}'));
SELECT jsonb_pretty(awa.alter_queue('u.all', '{}'));

-- A change keeps the rest; null goes back to the default.
SELECT awa.alter_queue('u.all', '{"priority": 3, "description": null, "lease": null}')
       = '{"shards": 4, "ordering": "strict", "priority": 3, "max_attempts": 7, "lease": "5 min", "retention": "2 d",
           "aging_interval": "30 s", "max_args_bytes": 2000, "failed_retention": "30 d", "dead_letters": false,
           "backoff": {"base": "5 s", "factor": 2, "jitter": 0, "max": "24 h"}, "notify": false, "description": null}' AS effective;
SELECT awa.alter_queue('u.all', '{}') ->> 'priority' AS kept;
-- It counts for the next call of every session, and a rollback takes it back.
SELECT priority, max_attempts FROM awa.enqueue('u.all') e, LATERAL awa.claim('u.all', 1 + 0 * e);
BEGIN;
SELECT awa.alter_queue('u.all', '{"priority": 1}') ->> 'priority' AS priority;
SELECT priority FROM awa.enqueue('u.all') e, LATERAL awa.claim('u.all', 1 + 0 * e);
ROLLBACK;
SELECT priority FROM awa.enqueue('u.all') e, LATERAL awa.claim('u.all', 1 + 0 * e);
BEGIN;
SELECT awa.create_queue('u.undone') AS created;
ROLLBACK;
SELECT awa.create_queue('u.undone') AS created;

-- Values that are refused, and nothing is changed by them.
SELECT * FROM t.try_all(
    $$SELECT awa.create_queue('')$$, $$SELECT awa.create_queue('u.x', '{"shard": 4}')$$, $$SELECT awa.create_queue('u.x', '{"shards": 0}')$$,
    $$SELECT awa.create_queue('u.x', '{"shards": 65}')$$, $$SELECT awa.create_queue('u.x', '{"shards": "4"}')$$,
    $$SELECT awa.create_queue('u.x', '{"shards": 1.5}')$$, $$SELECT awa.create_queue('u.x', '{"shards": 99999999999999999999}')$$,
    $$SELECT awa.create_queue('u.x', '{"ordering": "loose"}')$$, $$SELECT awa.create_queue('u.x', '{"ordering": true}')$$,
    $$SELECT awa.create_queue('u.x', '{"priority": 0}')$$, $$SELECT awa.create_queue('u.x', '{"priority": 5}')$$,
    $$SELECT awa.create_queue('u.x', '{"max_attempts": 1001}')$$, $$SELECT awa.create_queue('u.x', '{"max_args_bytes": 0}')$$,
    $$SELECT awa.create_queue('u.x', '{"lease": 5}')$$,
    $$SELECT awa.create_queue('u.x', '{"lease": "0"}')$$, $$SELECT awa.create_queue('u.x', '{"lease": "-1 s"}')$$,
    $$SELECT awa.create_queue('u.x', '{"retention": "-1 d"}')$$, $$SELECT awa.create_queue('u.x', '{"aging_interval": "-1 s"}')$$,
    $$SELECT awa.create_queue('u.x', '{"description": 1}')$$,
    $$SELECT awa.create_queue('u.x', '[]')$$, $$SELECT awa.create_queue('u.x', '"strict"')$$, $$SELECT awa.create_queue('u.x', 'null')$$,
    $$SELECT awa.alter_queue('u.one', '[]')$$, $$SELECT awa.alter_queue('u.one', 'null')$$, $$SELECT awa.alter_queue('u.one', '{"x": null}')$$,
    $$SELECT awa.alter_queue('u.all', '{"shards": 3}')$$, $$SELECT awa.alter_queue('u.all', '{"shards": null}')$$);
-- Text that is no interval or no time.
SELECT statement, code, help FROM t.try_all($$SELECT awa.create_queue('u.x', '{"lease": "soon"}')$$, $$SELECT awa.create_queue('u.x', '{"retention": ""}')$$,
                                            $$SELECT awa.enqueue_jobs('[{"queue": "u.one", "run_at": "soon"}]')$$);
SELECT awa.create_queue('u.x') AS was_not_there;
SELECT awa.alter_queue('u.all', '{"shards": 8}') ->> 'shards' AS grown;

-- Paused: no claim takes from it, enqueue and finish go on. True where something changed.
SELECT awa.enqueue('u.pause', to_jsonb(i)) > 0 AS id FROM generate_series(1, 3) i;
SELECT * FROM t.take('u.pause');
SELECT awa.pause_queue('u.pause', reason => 'deploy'), awa.pause_queue('u.pause'), awa.pause_queue('u.pause', 'another');
SELECT paused_by = current_user AS by, pause_reason, paused_at <= clock_timestamp() AS at FROM awa_internal.queues WHERE name = 'u.pause';
SELECT awa.enqueue('u.pause', '4') > 0 AS id;
SELECT count(*) FROM awa.claim('u.pause', 9);
SELECT awa.enqueue('u.other', '"other"') > 0 AS id;
SELECT args FROM awa.claim_from('{u.pause,u.other}', 9);
SELECT state, changed FROM awa.release(t.receipts('u.pause', '1'));
SELECT args FROM awa.complete_and_claim(NULL, '{u.pause}', 9);
SELECT awa.resume_queue('u.pause'), awa.resume_queue('u.pause');
SELECT paused_by, pause_reason, paused_at FROM awa_internal.queues WHERE name = 'u.pause';
SELECT args FROM awa.claim('u.pause', 9);
BEGIN;
SELECT awa.pause_queue('u.other');
ROLLBACK;
SELECT awa.enqueue('u.other', '"again"') > 0 AS id;
SELECT args FROM awa.claim('u.other');

-- Names are compared as they are: no folding, no trimming.
SELECT n, awa.create_queue(n) FROM unnest(array['U.Case', 'u.case', 'u.case ', 'u.🐘', 'u."x"', 'u.''y''']) n;
SELECT n, awa.create_queue(n) FROM unnest(array['U.Case', 'u.case', 'u.case ', 'u.🐘', 'u."x"', 'u.''y''']) n;
