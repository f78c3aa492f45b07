-- Producers: enqueue, enqueue_batch, enqueue_jobs.
-- A claim shows what they stored.
SELECT awa.enqueue('p.one') > 0 AS id;
SELECT awa.enqueue('p.one', '{"n": 1}') > 0 AS id;
SELECT awa.enqueue('p.one', '[1.50, 1e2, "ä", null]', 'kind', 3, '2020-01-01', 7, 'key', tags => '{a,b,a}',
                   metadata => '{"m": 1}') > 0 AS id;
SELECT awa.enqueue(queue => 'p.one', args => 'null', priority => 4, run_in => '-1 h') > 0 AS id;
SELECT awa.enqueue('p.one', 'true', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                   NULL, NULL, NULL) > 0 AS id;
SELECT queue, kind, args, priority, effective_priority, attempt, max_attempts, ordering_key, tags, metadata
FROM awa.claim('p.one', 10);

-- The other columns of a fresh job; run_at is when it was enqueued, the lease five minutes.
SELECT awa.enqueue('p.one', '"times"') > 0 AS id;
SELECT unique_key, checkpoint, callback, last_error, extra, run_at = enqueued_at AS run_at,
       enqueued_at BETWEEN now() - interval '1 min' AND claimed_at AS enqueued_at,
       claimed_at BETWEEN enqueued_at AND clock_timestamp() AS claimed_at, lease_until - claimed_at AS lease
FROM awa.claim('p.one');

-- The id that enqueue returns is the job's.
SELECT awa.enqueue('p.id') AS id \gset
SELECT job_id = :id AS same FROM awa.claim('p.id');

-- Untyped literals, int4, int8 and int2 all fit.
SELECT awa.enqueue('p.types', '1', 'k', 1, max_attempts => 1) > 0 AS literals,
       awa.enqueue('p.types', '2', 'k', 1::int4, max_attempts => 1::int2) > 0 AS int4,
       awa.enqueue('p.types', '3', 'k', 1::int8, max_attempts => 1::int8) > 0 AS int8;
SELECT args, priority, max_attempts FROM awa.claim('p.types', 10::int4);

-- A batch: one id for each of args, in their order, each once.
SELECT awa.enqueue_batch('p.batch', array['"a"', '"b"', '"a"', 'null']::jsonb[]) AS ids \gset
SELECT cardinality(i.ids) AS n, count(DISTINCT u) AS distinct_ids
FROM (SELECT :'ids'::bigint[] AS ids) i, unnest(i.ids) u GROUP BY i.ids;
SELECT args, job_id = (:'ids'::bigint[])[row_number() OVER ()] AS its_id, kind, priority, attempt, max_attempts
FROM awa.claim('p.batch', 10);
SELECT awa.enqueue_batch('p.batch', '{1,2,3}', 'kind', 1, NULL, 5, '{k1,NULL,k3}', tags => '{t}', metadata => '[]') IS NOT NULL
  AS ids;
SELECT args, kind, priority, max_attempts, ordering_key, tags, metadata FROM awa.claim('p.batch', 10);

-- No jobs: NULL and an empty array. The queue need not be there, and is not made.
SELECT awa.enqueue_batch('p.none', NULL) AS "null", awa.enqueue_batch('p.none', '{}') AS empty,
       awa.enqueue_batch('p.none', array[]::jsonb[], ordering_keys => '{}') AS with_keys;
SELECT awa.create_queue('p.none') AS was_not_there;

-- enqueue_jobs: other queues, all the keys that are built.
SELECT idx, job_id > 0 AS job_id, status, extra FROM awa.enqueue_jobs('[
    {"queue": "p.jobs2", "args": {"n": 1}},
    {"queue": "p.jobs1"},
    {"queue": "p.jobs2", "args": null, "kind": "k", "priority": 1, "max_attempts": 3, "ordering_key": "o", "tags": ["x", "y"],
     "metadata": {"deep": [1.0, "ü"]}, "run_at": "2020-01-01 00:00:00+00"},
    {"queue": "p.jobs2", "args": 12345678901234567890.5, "run_in": "-1 s", "tags": [], "unique_key": null, "after": null}
]');
SELECT queue, kind, args, priority, max_attempts, ordering_key, tags, metadata FROM awa.claim('p.jobs2', 10);
SELECT queue, kind, args FROM awa.claim('p.jobs1', 10);
SELECT * FROM awa.enqueue_jobs('[]');
SELECT * FROM awa.enqueue_jobs(NULL);
-- The ids come in input order although the lanes are visited in theirs.
CREATE TEMP TABLE put AS SELECT * FROM awa.enqueue_jobs(
    '[{"queue": "p.j2", "args": 1, "priority": 4}, {"queue": "p.j1", "args": 2}, {"queue": "p.j2", "args": 3}]');
CREATE TEMP TABLE got AS SELECT * FROM awa.claim_from('{p.j1,p.j2}', 10);
SELECT put.idx, got.queue, got.args FROM put JOIN got USING (job_id) ORDER BY put.idx;

-- One statement can enqueue and claim: each verb ends with its work visible.
DO $$
DECLARE
    claimed jsonb;
BEGIN
    PERFORM awa.enqueue('p.same', '"within"');
    SELECT args INTO claimed FROM awa.claim('p.same');
    RAISE NOTICE 'claimed %', claimed;
END $$;
SELECT (SELECT count(*) FROM awa.claim('p.same')) AS before, awa.enqueue('p.same', '"then"') IS NOT NULL AS enqueued,
       (SELECT args FROM awa.claim('p.same') LIMIT 1) AS after;

-- Rollback of a transaction and of a savepoint takes the job along, and an error of a caller does.
BEGIN;
SELECT awa.enqueue('p.undo', '"rolled back"') > 0 AS id;
ROLLBACK;
BEGIN;
SELECT awa.enqueue('p.undo', '"kept 1"') > 0 AS id;
SAVEPOINT s;
SELECT awa.enqueue('p.undo', '"undone"') > 0 AS id;
ROLLBACK TO s;
SELECT awa.enqueue('p.undo', '"kept 2"') > 0 AS id;
COMMIT;
SELECT args FROM awa.claim('p.undo', 10);

-- Where queues do not come by themselves, an unknown one is an error.
SET awa_queue.auto_create_queues = off;
SELECT * FROM t.try_all($$SELECT awa.enqueue('p.unknown')$$, $$SELECT awa.enqueue_batch('p.unknown', '{1}')$$,
                        $$SELECT awa.enqueue_jobs('[{"queue": "p.unknown"}]')$$, $$SELECT awa.enqueue('p.one')$$);
RESET awa_queue.auto_create_queues;

-- Names: anything of 1 to 200 characters, taken as it is.
SELECT n.name, awa.enqueue(n.name, to_jsonb(n.name)) > 0 AS id, (SELECT c.args #>> '{}' = c.queue AND c.kind = c.queue FROM awa.claim(n.name) c) AS back
FROM (VALUES ('A'), ('a'), ('with space'), (' lead and trail '), ('"quoted"'), ('it''s'), ('semi;colon--'), ('back\slash'),
             ('🐘🐘'), ('Ünï'), ('a,b{c}'), ('%s'), ('null'), ('')) AS n (name)
WHERE n.name <> '';
SELECT length(c.queue), c.queue = repeat('ä', 200) AS same
FROM awa.enqueue(repeat('ä', 200), kind => repeat('🐘', 200)) AS e, LATERAL awa.claim(repeat('ä', 200), 1 + 0 * e) AS c;
SELECT * FROM t.try_all($$SELECT awa.enqueue('')$$, $$SELECT awa.enqueue(repeat('ä', 201))$$,
                        $$SELECT awa.enqueue('q', kind => '')$$, $$SELECT awa.enqueue('q', kind => repeat('k', 201))$$,
                        $$SELECT awa.enqueue_batch('', '{1}')$$, $$SELECT awa.enqueue_batch('', '{}')$$,
                        $$SELECT awa.enqueue_batch(repeat('q', 201), '{1}')$$,
                        $$SELECT awa.enqueue_jobs('[{"queue": ""}]')$$);
