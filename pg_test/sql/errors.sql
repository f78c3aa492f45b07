-- Each error of the contract: its SQLSTATE, and that a DETAIL or HINT helps on (column help). None may be XX000.

-- 22004: a required argument is NULL, or an element that has to be there.
SELECT * FROM t.try_all(
    'SELECT awa.enqueue(NULL)', $$SELECT awa.enqueue('q', NULL)$$, $$SELECT awa.enqueue_batch(NULL, '{1}')$$,
    $$SELECT awa.enqueue_batch(NULL, NULL)$$,
    $$SELECT awa.enqueue_batch('q', '{NULL}')$$, $$SELECT awa.enqueue_batch('q', '{1,NULL,3}')$$,
    $$SELECT awa.enqueue('q', tags => '{a,NULL}')$$, $$SELECT awa.enqueue_jobs('[{}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": null}]')$$,
    'SELECT awa.claim(NULL)', $$SELECT awa.claim_from('{q,NULL}')$$, $$SELECT awa.claim_from('{NULL}', 0)$$,
    $$SELECT awa.complete_and_claim('{}', '{NULL}')$$,
    'SELECT awa.create_queue(NULL)', $$SELECT awa.alter_queue(NULL, '{}')$$, $$SELECT awa.alter_queue('q', NULL)$$,
    'SELECT awa.pause_queue(NULL)', 'SELECT awa.resume_queue(NULL)', 'SELECT awa.has_feature(NULL)', 'SELECT awa.job(NULL)',
    'SELECT awa.channel(NULL)');

-- 22023: a bad value, an unknown key, arrays of different lengths.
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue('q', priority => 0)$$, $$SELECT awa.enqueue('q', priority => 5)$$,
    $$SELECT awa.enqueue('q', priority => -9223372036854775808)$$, $$SELECT awa.enqueue('q', priority => 4294967298)$$,
    $$SELECT awa.enqueue('q', max_attempts => 0)$$, $$SELECT awa.enqueue('q', max_attempts => 1001)$$,
    $$SELECT awa.enqueue('q', max_attempts => 65537)$$,
    $$SELECT awa.enqueue('q', run_at => now(), run_in => '0')$$, $$SELECT awa.enqueue('q', run_at => 'infinity')$$,
    $$SELECT awa.enqueue_batch('q', '{1}', priority => 5)$$, $$SELECT awa.enqueue_batch('q', '{1}', max_attempts => 0)$$,
    $$SELECT awa.enqueue_batch('q', '{1,2}', ordering_keys => '{a}')$$,
    $$SELECT awa.enqueue_batch('q', '{1}', ordering_keys => '{}')$$,
    $$SELECT awa.enqueue_batch('q', '{}', ordering_keys => '{a}')$$,
    $$SELECT awa.enqueue_batch('q', NULL, ordering_keys => '{a}')$$,
    $$SELECT awa.claim('q', -1)$$, $$SELECT awa.claim_from('{q}', -1)$$, $$SELECT awa.claim_from('{}', -1)$$,
    $$SELECT awa.claim('q', -9223372036854775808)$$,
    $$SELECT awa.complete_and_claim('{}', '{q}', -1)$$, $$SELECT awa.claim('q', lease => '0')$$,
    $$SELECT awa.claim('q', lease => '-1 s')$$, $$SELECT awa.complete_and_claim('{}', '{q}', lease => '-1 s')$$);
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue_jobs('{"queue": "q"}')$$, $$SELECT awa.enqueue_jobs('"q"')$$, $$SELECT awa.enqueue_jobs('null')$$,
    $$SELECT awa.enqueue_jobs('[1]')$$, $$SELECT awa.enqueue_jobs('[null]')$$, $$SELECT awa.enqueue_jobs('[[]]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "arg": 1}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "options": {}}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "job_id": null}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": 1}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "kind": 1}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "priority": "1"}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "priority": 1.5}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "priority": 5}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "max_attempts": 1e30}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "max_attempts": true}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "ordering_key": 7}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "tags": "a"}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "tags": ["a", 1]}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "tags": {"a": 1}}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "run_at": 5}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "run_at": "2020-01-01", "run_in": "1 s"}]')$$);
-- One wrong job and none is enqueued.
SELECT code FROM t.try($$SELECT awa.enqueue_jobs('[{"queue": "e.none"}, {"queue": "e.none", "priority": 9}]')$$);
SELECT awa.create_queue('e.none') AS was_not_there;

-- options: nothing is known yet; {} and NULL are fine.
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue('q', options => '{"x": 1}')$$, $$SELECT awa.enqueue_batch('q', '{1}', options => '{"x": 1}')$$,
    $$SELECT awa.enqueue_jobs('[]', options => '{"x": 1}')$$, $$SELECT awa.claim('q', options => '{"x": 1}')$$,
    $$SELECT awa.claim_from('{q}', options => '{"x": 1}')$$, $$SELECT awa.complete_and_claim('{}', '{q}', options => '{"x": 1}')$$,
    $$SELECT awa.complete('{}', options => '{"x": 1}')$$, $$SELECT awa.release('{}', options => '{"x": 1}')$$,
    $$SELECT awa.cancel_claimed('{}', options => '{"x": 1}')$$, $$SELECT awa.create_queue('e.q', options => '{"x": 1}')$$,
    $$SELECT awa.alter_queue('q', '{}', options => '{"x": 1}')$$, $$SELECT awa.pause_queue('q', options => '{"x": 1}')$$,
    $$SELECT awa.resume_queue('q', options => '{"x": 1}')$$,
    $$SELECT awa.enqueue('q', options => '[]')$$, $$SELECT awa.enqueue('q', options => 'null')$$, $$SELECT awa.enqueue('q', options => '1')$$,
    $$SELECT awa.enqueue('q', options => '{"x": 1e400}')$$, $$SELECT awa.create_queue('e.q', '{"shards": 1e400}')$$,
    $$SELECT awa.claim('q', 0, options => '{}')$$, $$SELECT awa.claim('q', 0, options => NULL)$$);

-- 2202E: arrays of more than one dimension. An empty array has none.
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue_batch('q', '{{1},{2}}')$$, $$SELECT awa.enqueue_batch('q', '{1,2}', ordering_keys => '{{a},{b}}')$$,
    $$SELECT awa.enqueue('q', tags => '{{a}}')$$, $$SELECT awa.enqueue_batch('q', '{1}', tags => '{{a}}')$$,
    $$SELECT awa.claim_from('{{q}}')$$, $$SELECT awa.complete_and_claim('{{1}}', '{q}')$$,
    $$SELECT awa.complete_and_claim('{1}', '{{q}}')$$, $$SELECT awa.complete('{{1,2},{3,4}}')$$,
    $$SELECT awa.release('{{1}}')$$, $$SELECT awa.cancel_claimed('{{1}}')$$);
-- Arrays that do not count from one are arrays like others.
SELECT cardinality(awa.enqueue_batch('e.bounds', '[5:6]={1,2}', ordering_keys => '[0:1]={a,b}')) AS n;
SELECT args, ordering_key FROM awa.claim_from('[-1:-1]={e.bounds}', 2);

-- 42704: no such queue.
SELECT * FROM t.try_all(
    $$SELECT awa.alter_queue('e.missing', '{}')$$, $$SELECT awa.pause_queue('e.missing')$$, $$SELECT awa.resume_queue('e.missing')$$);

-- 25006: in a read-only transaction. What only looks may be called.
BEGIN READ ONLY;
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue('q')$$, $$SELECT awa.enqueue_batch('q', '{}')$$, $$SELECT awa.enqueue_jobs('[]')$$, $$SELECT awa.claim('q', 0)$$,
    $$SELECT awa.claim_from('{}')$$, $$SELECT awa.complete_and_claim('{}', '{}')$$, $$SELECT awa.complete('{}')$$,
    $$SELECT awa.release('{}')$$, $$SELECT awa.cancel_claimed('{}')$$, $$SELECT awa.create_queue('e.q')$$,
    $$SELECT awa.alter_queue('q', '{}')$$, $$SELECT awa.pause_queue('q')$$, $$SELECT awa.resume_queue('q')$$,
    'SELECT awa_internal.seal()', 'SELECT awa_internal.close(0)', 'SELECT awa_internal.empty(0)',
    $$SELECT awa.has_feature('claim')$$, 'SELECT awa.job(1)', 'SELECT count(*) FROM awa.jobs', 'SELECT count(*) FROM awa.queues',
    'SELECT count(*) FROM awa.queue_stats', 'SELECT count(*) FROM awa.ring_status', $$SELECT awa.channel('q')$$, 'SELECT awa.version()');
COMMIT;

-- 25001: CALL in a transaction block, and maintenance under an old snapshot.
SELECT * FROM t.try_all('CALL awa.maintain()');
BEGIN;
CALL awa.maintain();
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT * FROM t.try_all('SELECT awa_internal.seal()', 'SELECT awa_internal.close(0)', 'SELECT awa_internal.empty(0)');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT * FROM t.try_all('SELECT awa_internal.seal()', 'SELECT awa_internal.close(0)', 'SELECT awa_internal.empty(0)');
COMMIT;
SELECT * FROM t.try_all('SELECT awa_internal.close(-1)', 'SELECT awa_internal.close(64)', 'SELECT awa_internal.empty(64)',
                        'SELECT awa_internal.close(NULL)', 'SELECT awa_internal.empty(NULL)', 'SELECT awa_internal.lane_state(NULL)');

-- A step of maintenance is for a transaction of its own: no verb goes behind it.
BEGIN;
SELECT awa_internal.seal() ~ '^sealed: slot \d+ is current$' AS sealed;
SELECT statement, code, help FROM t.try_all($$SELECT awa.enqueue('e.bounds')$$, $$SELECT awa.claim('e.bounds')$$, $$SELECT awa.complete('{1}')$$);
ROLLBACK;

-- 54000: over a limit.
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue('q', tags => ARRAY(SELECT 'tag' || i FROM generate_series(1, 21) i))$$,
    $$SELECT awa.enqueue_batch('q', '{1}', tags => ARRAY(SELECT 'tag' || i FROM generate_series(1, 21) i))$$,
    $$SELECT awa.enqueue_jobs(jsonb_build_array(jsonb_build_object('queue', 'q', 'tags', ARRAY(SELECT 'tag' || i FROM generate_series(1, 21) i))))$$,
    $$SELECT awa.create_queue(repeat('q', 201))$$,
    $$SELECT awa.claim('q', worker => repeat('w', 201))$$, $$SELECT awa.complete_and_claim('{}', '{q}', worker => repeat('ä', 201))$$,
    $$SELECT awa.enqueue('q', to_jsonb(repeat('x', 1024 * 1024)))$$,
    $$SELECT awa.enqueue_batch('q', array['1', to_jsonb(repeat('x', 1024 * 1024))])$$,
    $$SELECT awa.enqueue_jobs(jsonb_build_array(jsonb_build_object('queue', 'q', 'args', repeat('x', 1024 * 1024))))$$);
SELECT cardinality(tags) FROM awa.enqueue('e.limits', tags => ARRAY(SELECT 'tag' || i FROM generate_series(1, 20) i)) e,
     LATERAL awa.claim('e.limits', 1 + 0 * e);
SELECT awa.create_queue('e.small', '{"max_args_bytes": 100}');
SELECT code FROM t.try_all($$SELECT awa.enqueue('e.small', to_jsonb(repeat('x', 50)))$$, $$SELECT awa.enqueue('e.small', to_jsonb(repeat('x', 200)))$$);
SET awa_queue.max_args_bytes = '2kB';
SELECT code FROM t.try_all($$SELECT awa.enqueue('q', to_jsonb(repeat('x', 1000)))$$, $$SELECT awa.enqueue('q', to_jsonb(repeat('x', 3000)))$$);
RESET awa_queue.max_args_bytes;

-- 42501: a role without rights can do nothing; one with USAGE and EXECUTE produces and works without any right on a table.
CREATE ROLE regress_awa_nobody;
CREATE ROLE regress_awa_worker;
GRANT USAGE ON SCHEMA t TO regress_awa_nobody, regress_awa_worker;
SELECT count(*) FROM t.take('q', 1000);
SET ROLE regress_awa_nobody;
SELECT code, message FROM t.try_all($$SELECT awa.enqueue('q')$$, $$SELECT awa.claim('q')$$, 'SELECT * FROM awa_internal.ready', 'CALL awa.maintain()');
RESET ROLE;
GRANT USAGE ON SCHEMA awa TO regress_awa_nobody, regress_awa_worker;
SET ROLE regress_awa_nobody;
SELECT code, message FROM t.try_all($$SELECT awa.enqueue('q')$$, $$SELECT awa.claim('q')$$, $$SELECT awa.has_feature('claim')$$, 'CALL awa.maintain()');
RESET ROLE;
GRANT EXECUTE ON FUNCTION awa.enqueue, awa.enqueue_batch, awa.enqueue_jobs, awa.claim, awa.complete, awa.complete_and_claim, awa.release
TO regress_awa_worker;
SET ROLE regress_awa_worker;
SELECT awa.enqueue('e.rights', '1') > 0 AS id, cardinality(awa.enqueue_batch('e.rights', '{2,3}')) AS n;
SELECT state, changed FROM awa.release(ARRAY(SELECT receipt FROM awa.claim('e.rights')));
SELECT state, changed FROM awa.complete(ARRAY(SELECT receipt FROM awa.claim('e.rights', 2)));
SELECT args FROM awa.complete_and_claim('{}', '{e.rights}', 5);
SELECT code, message FROM t.try_all('SELECT * FROM awa_internal.ready', 'SELECT awa_internal.seal()', 'INSERT INTO awa_internal.claims SELECT',
                                    $$SELECT awa.create_queue('e.q')$$);
RESET ROLE;
REVOKE ALL ON FUNCTION awa.enqueue, awa.enqueue_batch, awa.enqueue_jobs, awa.claim, awa.complete, awa.complete_and_claim, awa.release
FROM regress_awa_worker;
REVOKE USAGE ON SCHEMA awa, t FROM regress_awa_nobody, regress_awa_worker;
DROP ROLE regress_awa_nobody, regress_awa_worker;

-- What a caller sees of an error as a whole.
SELECT awa.enqueue('q', priority => 7);
SELECT awa.enqueue_batch('q', '{1,2}', ordering_keys => '{a}');
SELECT awa.enqueue('q', options => '{"when": "later"}');
SELECT awa.park(1);
