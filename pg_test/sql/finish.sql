-- complete, release, cancel_claimed: one row per receipt, in input order.

-- complete returns whole rows; the queue and the kind are the job's; it will not run again, so run_at is null.
SELECT count(*) FROM awa.enqueue_jobs('[{"queue": "f.one", "args": 1}, {"queue": "f.one", "args": 2, "kind": "k"},
                          {"queue": "f.one", "args": 3}, {"queue": "f.one", "args": 4}, {"queue": "f.one", "args": 5}]');
SELECT * FROM t.take('f.one', 5);
SELECT f.receipt = t.receipt('f.one', '2') AS receipt, f.job_id = h.job_id AS job_id, f.queue, f.kind, f.attempt, f.state,
       f.run_at, f.changed, f.extra
FROM awa.complete(array[t.receipt('f.one', '2')]) f, t.held h WHERE h.queue = 'f.one' AND h.args = '2';

-- Input order, NULL and a receipt twice and one of nobody each in their place.
SELECT h.args, f.receipt IS NULL AS null_receipt, f.job_id IS NULL AS null_job, f.queue, f.state, f.changed
FROM awa.complete(t.receipts('f.one', '4', '3') || array[NULL, 1]::bigint[] || t.receipts('f.one', '4', '2')) WITH ORDINALITY
     AS f (receipt, job_id, queue, kind, attempt, state, run_at, changed, extra, no)
LEFT JOIN t.held h ON h.queue = 'f.one' AND h.receipt = f.receipt ORDER BY f.no;

-- No receipts, no rows; all of the three alike.
SELECT count(*) FROM awa.complete(NULL);
SELECT count(*) FROM awa.complete('{}');
SELECT count(*) FROM awa.release(NULL);
SELECT count(*) FROM awa.release('{}');
SELECT count(*) FROM awa.cancel_claimed(NULL);
SELECT count(*) FROM awa.cancel_claimed('{}');
SELECT receipt, job_id, queue, kind, attempt, state, run_at, changed, extra FROM awa.release('{NULL}');
SELECT receipt, job_id, queue, kind, attempt, state, run_at, changed, extra FROM awa.cancel_claimed('{NULL}', 'why');

-- Receipts of nothing: whatever number it is, nothing is changed.
SELECT f.receipt, f.job_id, f.state, f.changed
FROM awa.complete('{0,-1,1,63,64,1023,65536,9223372036854775807,-9223372036854775808}') f;
SELECT DISTINCT f.state, f.changed
FROM unnest(array[1, 1023, 1024, 64512, 65536, 65536 * 64]) AS off (n),
     LATERAL awa.complete(array[t.receipt('f.one', '1') + off.n]) f;
SELECT f.state, f.changed FROM awa.complete(t.receipts('f.one', '1')) f;

-- The same verb again: the same state, changed = false, no error. Another verb: stale, an error under strict.
SELECT state, changed FROM awa.complete(t.receipts('f.one', '1'), strict => true);
SELECT state, changed FROM awa.cancel_claimed(t.receipts('f.one', '1', '5'), reason => 'not wanted');
SELECT state, changed FROM awa.cancel_claimed(t.receipts('f.one', '5'));
SELECT state, changed FROM awa.complete(t.receipts('f.one', '5'));
SELECT state, changed FROM awa.release(t.receipts('f.one', '1', '5'));
SELECT * FROM t.try_all($$SELECT awa.complete(t.receipts('f.one', '1', '5'), strict => true)$$,
                        $$SELECT awa.complete(t.receipts('f.one', '1', '2'), strict => true)$$,
                        $$SELECT awa.complete('{1}', strict => true)$$,
                        $$SELECT awa.complete('{NULL}', strict => true)$$,
                        $$SELECT awa.complete(t.receipts('f.one', '5'), strict => NULL)$$);
SELECT * FROM awa.claim('f.one', 9);

-- Strict takes nothing back by halves: the call that raised has completed neither.
SELECT cardinality(awa.enqueue_batch('f.strict', array['1', '2', '3']::jsonb[])) AS n;
SELECT * FROM t.take('f.strict', 3);
SELECT state, changed FROM awa.cancel_claimed(t.receipts('f.strict', '2'));
SELECT * FROM t.try($$SELECT * FROM awa.complete(t.receipts('f.strict', '1', '2', '3'), strict => true)$$);
SELECT state, changed FROM awa.complete(t.receipts('f.strict', '1', '3'));

-- release: to the tail of its lane, same id, same attempt, a new receipt; the old one is stale.
SELECT cardinality(awa.enqueue_batch('f.release', array['1', '2', '3']::jsonb[], kind => 'k', priority => 3, max_attempts => 4,
                                     ordering_keys => '{a,b,c}', tags => '{x}', metadata => '{"m": 1}')) AS n;
SELECT * FROM t.take('f.release', 2);
SELECT f.queue, f.kind, f.attempt, f.state, f.changed, f.run_at <= clock_timestamp() AS due FROM awa.release(t.receipts('f.release', '1')) f;
SELECT state, changed FROM awa.release(t.receipts('f.release', '1'));
SELECT state, changed FROM awa.complete(t.receipts('f.release', '1'));
SELECT c.args, c.kind, c.priority, c.attempt, c.max_attempts, c.ordering_key, c.tags, c.metadata, c.receipt = h.receipt AS old_receipt,
       c.job_id = h.job_id AS same_job, c.enqueued_at <= c.run_at AS enqueued_first
FROM awa.claim('f.release', 9) c LEFT JOIN t.held h ON h.queue = 'f.release' AND h.args = c.args;

-- Released and claimed again and again, it stays the first attempt of the same job.
SELECT awa.enqueue('f.often', '1') AS id \gset
DO $$
BEGIN
    FOR i IN 1..5 LOOP
        PERFORM awa.release(ARRAY(SELECT receipt FROM awa.claim('f.often')));
    END LOOP;
END $$;
SELECT job_id = :id AS same, attempt, max_attempts FROM awa.claim('f.often', 5);

-- Rollback of a finish leaves the attempt running; of a claim, its receipt is nobody's.
SELECT cardinality(awa.enqueue_batch('f.undo', array['1', '2']::jsonb[])) AS n;
SELECT * FROM t.take('f.undo', 1);
BEGIN;
SELECT state, changed FROM awa.complete(t.receipts('f.undo', '1'));
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT state, changed FROM awa.release(t.receipts('f.undo', '1'));
ROLLBACK TO s;
SELECT state, changed FROM awa.cancel_claimed(t.receipts('f.undo', '1'));
COMMIT;
SELECT state, changed FROM awa.cancel_claimed(t.receipts('f.undo', '1'));
BEGIN;
SELECT receipt FROM awa.claim('f.undo') \gset
ROLLBACK;
SELECT job_id, state, changed FROM awa.complete(array[:receipt]);
SELECT args FROM awa.claim('f.undo', 9);

-- One call over many claims, queues and slots.
SELECT awa.enqueue_batch('f.many' || q, ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 50) i)) IS NOT NULL AS ids FROM generate_series(1, 3) q;
SELECT count(*) FROM generate_series(1, 3) q, LATERAL t.take('f.many' || q, 50);
SELECT awa_internal.seal() LIKE 'sealed: slot % is current' AS sealed;
SELECT awa.enqueue_batch('f.many1', ARRAY(SELECT to_jsonb(i) FROM generate_series(51, 2000) i)) IS NOT NULL AS ids;
SELECT count(*) FROM t.take('f.many1', 2000);
SELECT queue, state, changed, count(*)
FROM awa.complete(ARRAY(SELECT receipt FROM t.held WHERE queue LIKE 'f.many%' ORDER BY md5(receipt::text))) GROUP BY 1, 2, 3 ORDER BY 1;
SELECT count(*) FROM awa.claim_from('{f.many1,f.many2,f.many3}', 100);
