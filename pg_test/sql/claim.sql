-- claim, claim_from, complete_and_claim: what they return, in which order, and the limits of a call.

-- Defaults: one job. max_jobs NULL means the default, 0 no row, more than there is what there is.
SELECT cardinality(awa.enqueue_batch('c.n', array['1', '2', '3', '4', '5', '6']::jsonb[])) AS n;
SELECT args FROM awa.claim('c.n');
SELECT args FROM awa.claim('c.n', NULL);
SELECT args FROM awa.claim('c.n', 0);
SELECT args FROM awa.claim(queue => 'c.n', max_jobs => 2);
SELECT args FROM awa.claim('c.n', 9223372036854775807);
SELECT args FROM awa.claim('c.n', 10);

-- Order is that of the calls, whatever their transactions and sizes were.
SELECT awa.enqueue('c.order', to_jsonb(i)) > 0 AS id FROM generate_series(1, 3) i;
SELECT cardinality(awa.enqueue_batch('c.order', array['4', '5']::jsonb[])) AS n;
SELECT awa.enqueue('c.order', '6') > 0 AS id;
SELECT args FROM awa.claim('c.order', 4);
SELECT args FROM awa.claim('c.order', 4);

-- A LIMIT hides jobs that are claimed all the same.
SELECT cardinality(awa.enqueue_batch('c.limit', array['1', '2', '3']::jsonb[])) AS n;
SELECT args FROM awa.claim('c.limit', 3) LIMIT 1;
SELECT args FROM awa.claim('c.limit', 3);

-- Worker and lease. The argument goes before the queue's.
SELECT awa.create_queue('c.lease', '{"lease": "90 s"}');
SELECT cardinality(awa.enqueue_batch('c.lease', array['1', '2', '3']::jsonb[])) AS n;
SELECT args, lease_until - claimed_at AS lease FROM awa.claim('c.lease', worker => 'w1');
SELECT args, lease_until - claimed_at AS lease FROM awa.claim('c.lease', 1, 'w1', '1 month'::interval - '1 month'::interval + '2 h');
SELECT args, lease_until - claimed_at AS lease FROM awa.claim('c.lease', 1, NULL, '00:00:01');

-- Several queues: each is given its share first, what is left goes to who has more; a name twice counts once.
SELECT awa.enqueue_batch('c.' || q, ARRAY(SELECT to_jsonb(q || i) FROM generate_series(1, n) i)) IS NOT NULL AS ids
FROM (VALUES ('a', 6), ('b', 1), ('c', 6)) AS v (q, n);
SELECT queue, count(*), array_agg(args #>> '{}' ORDER BY no)
FROM (SELECT *, row_number() OVER () AS no FROM awa.claim_from('{c.a,c.b,c.c}', 6)) c GROUP BY 1 ORDER BY 1;
SELECT queue, count(*) FROM awa.claim_from('{c.b,c.c,c.c}', 2) GROUP BY 1 ORDER BY 1;
SELECT queue, count(*) FROM awa.claim_from(queues => '{c.a,c.b,c.c}', max_jobs => 100) GROUP BY 1 ORDER BY 1;
SELECT count(*) FROM awa.claim_from(NULL, 5);
SELECT count(*) FROM awa.claim_from('{}', 5);
SELECT count(*) FROM awa.claim_from('{c.a}', 0);

-- An unknown queue: no row, and one warning a session and name.
SELECT count(*) FROM awa.claim('c.unknown');
SELECT count(*) FROM awa.claim('c.unknown');
SELECT awa.enqueue('c.known', '1') > 0 AS id;
SELECT queue FROM awa.claim_from('{c.unknown2,c.known,c.unknown}', 2);
DISCARD ALL;
SELECT count(*) FROM awa.claim_from('{c.unknown,c.unknown2}', 2);

-- complete_and_claim ends receipts, then claims.
SELECT cardinality(awa.enqueue_batch('c.both', array['1', '2', '3', '4', '5']::jsonb[])) AS n;
SELECT * FROM t.take('c.both', 2);
SELECT queue, args, attempt FROM awa.complete_and_claim(t.receipts('c.both', '1', '2'), '{c.both}', 1);
SELECT state, changed FROM awa.complete(t.receipts('c.both', '1', '2'));
SELECT queue, args FROM awa.complete_and_claim(NULL, array['c.both']);
SELECT queue, args FROM awa.complete_and_claim('{}', '{c.both,c.a}', max_jobs => 0);
SELECT queue, args FROM awa.complete_and_claim(receipts => '{NULL}', queues => '{c.both}', max_jobs => 5, worker => 'w', lease => '1 min');
SELECT count(*) FROM awa.complete_and_claim('{}', NULL, 5);
SELECT count(*) FROM awa.complete_and_claim(NULL, '{}', 5);
-- Completed before: no error, strict or not. Ended otherwise: an error under strict, and nothing is claimed.
SELECT awa.enqueue('c.both', to_jsonb(i)) > 0 AS id FROM generate_series(6, 9) i;
SELECT * FROM t.take('c.both', 2);
SELECT state, changed FROM awa.cancel_claimed(t.receipts('c.both', '7'));
SELECT args FROM awa.complete_and_claim(t.receipts('c.both', '6', '1'), '{c.both}', 1, strict => true);
SELECT * FROM t.try_all($$SELECT * FROM awa.complete_and_claim(t.receipts('c.both', '7'), '{c.both}', 1, strict => true)$$,
                        $$SELECT * FROM awa.complete_and_claim(t.receipts('c.both', '7'), '{c.both}', 0)$$);
SELECT args FROM awa.complete_and_claim(t.receipts('c.both', '7'), '{c.both}', 5);

-- A claim that is rolled back, wholly or to a savepoint, gives its jobs back at once. In a strict queue they are next; in a
-- relaxed one they may come after jobs that stand behind them.
SELECT awa.create_queue('c.undo', '{"ordering": "strict"}');
SELECT q, cardinality(awa.enqueue_batch(q, array['1', '2', '3', '4']::jsonb[])) AS n FROM unnest(array['c.undo', 'c.undone']) q;
BEGIN;
SELECT args FROM awa.claim('c.undo', 2);
SELECT args FROM awa.claim('c.undone', 2);
ROLLBACK;
BEGIN;
SELECT args FROM awa.claim('c.undo', 1);
SELECT count(*) FROM awa.claim('c.undone', 1);
SAVEPOINT s;
SELECT args FROM awa.claim('c.undo', 2);
SELECT count(*) FROM awa.claim('c.undone', 2);
ROLLBACK TO s;
SELECT args FROM awa.claim('c.undo', 2);
SELECT count(*) FROM awa.claim('c.undone', 2);
COMMIT;
SELECT args FROM awa.claim('c.undo', 9);
SELECT count(*) FROM awa.claim('c.undone', 9);

-- A transaction can claim and finish what it enqueued itself, together with what was there.
SELECT awa.enqueue('c.own', '"before"') > 0 AS id;
BEGIN;
SELECT awa.enqueue('c.own', '"own 1"') > 0 AS id;
SELECT awa.enqueue('c.own', '"own 2"') > 0 AS id;
SELECT * FROM t.take('c.own', 3);
SELECT state, changed FROM awa.complete(t.receipts('c.own', '"own 2"', '"before"'));
COMMIT;
SELECT args FROM awa.claim('c.own', 9);
SELECT state, changed FROM awa.complete(t.receipts('c.own', '"own 1"', '"own 2"', '"before"'));

-- Args as large as may be, and of sizes that are compressed or stored out of line.
CREATE TEMP TABLE large AS
SELECT n, to_jsonb(string_agg(md5(n || '.' || i), '')) AS args
FROM unnest(array[1, 60, 300, 32000]) n, generate_series(1, n) i GROUP BY n;
SELECT n, awa.enqueue('c.large', args) > 0 AS id FROM large ORDER BY n;
SELECT n, length(c.args #>> '{}'), c.args = large.args AS same
FROM (SELECT row_number() OVER () AS no, args FROM awa.claim('c.large', 4)) c
JOIN (SELECT row_number() OVER (ORDER BY n) AS no, * FROM large) large USING (no) ORDER BY no;
SELECT awa.enqueue('c.large', to_jsonb(repeat('x', 1000000))) > 0 AS compressible;
SELECT length(args #>> '{}') FROM awa.claim('c.large');
