-- job(id) and the views, through the life of jobs. All read what is committed, and what the own transaction wrote.
SELECT awa.enqueue_batch('r.q', array['1', '2', '3', '4', '5']::jsonb[], 'kind', 3, NULL, 4, '{a,b,c,d,e}', tags => '{t}', metadata => '{"m": 1}')
       IS NOT NULL AS ids;
SELECT * FROM t.take('r.q', 4);
SELECT state, changed FROM awa.complete(t.receipts('r.q', '1'));
SELECT state, changed FROM awa.cancel_claimed(t.receipts('r.q', '2'), 'not wanted');
SELECT state, changed FROM awa.release(t.receipts('r.q', '3'));
-- Waiting 5 and released 3, running 4, completed 1, cancelled 2.
SELECT queue, kind, state, priority, attempt, max_attempts, args, ordering_key, unique_key, tags, metadata, progress, output, errors #- '{0,at}' AS errors, errors #>> '{0,at}' ~ '^\d{4}-\d\d-\d\dT' AS at,
       enqueued_at <= run_at AS run_at, claimed_at >= enqueued_at AS claimed_at, lease_until - claimed_at AS lease,
       finished_at >= claimed_at AS finished_at, worker
FROM awa.jobs WHERE queue = 'r.q' ORDER BY args::int;
-- Job by job it is the same, whatever the id.
SELECT count(*), bool_and(to_jsonb(a) = to_jsonb(j) - 'extra') AS same
FROM awa.jobs a, LATERAL awa.job(a.job_id) j WHERE a.queue = 'r.q';
SELECT count(*) FROM unnest(array[0, -1, 9223372036854775807]) i, LATERAL awa.job(i);

SELECT paused, ready, scheduled, retryable, blocked, waiting, overdue, running, completed, failed, cancelled,
       oldest_ready_seconds BETWEEN 0 AND 60 AS oldest_ready_seconds, enqueued_total, completed_total, failed_total, retried_total,
       rescued_total, stale_total
FROM awa.queue_stats WHERE queue = 'r.q';
-- A stale finish is counted.
SELECT state FROM awa.complete(t.receipts('r.q', '2', '3'));
SELECT state FROM awa.complete(t.receipts('r.q', '1'));
SELECT stale_total FROM awa.queue_stats WHERE queue = 'r.q';

-- What the own transaction did is seen by it, and gone when it is rolled back.
BEGIN;
SELECT awa.enqueue('r.q', '6') AS id \gset
SELECT state, args FROM awa.job(:id);
SELECT count(*) FROM awa.jobs WHERE queue = 'r.q';
ROLLBACK;
SELECT state, args FROM awa.job(:id);
SELECT count(*) FROM awa.jobs WHERE queue = 'r.q';

-- A worker's name is shown while it runs and after.
SELECT awa.enqueue('r.worker', '1') AS id \gset
SELECT receipt FROM awa.claim('r.worker', worker => 'host-1') \gset
SELECT state, worker FROM awa.job(:id);
SELECT state FROM awa.complete(array[:receipt]);
SELECT state, worker FROM awa.job(:id);

-- queues: settings that differ from the defaults, who paused and why.
SELECT awa.create_queue('r.settings', '{"shards": 2, "description": "d"}'), awa.pause_queue('r.settings', 'why');
SELECT queue, settings, paused, paused_by = current_user AS by, reason, auto_created, created_at <= now() AS created_at
FROM awa.queues WHERE queue IN ('r.q', 'r.settings') ORDER BY 1;
SELECT paused, ready, oldest_ready_seconds, enqueued_total FROM awa.queue_stats WHERE queue = 'r.settings';

-- Counts through every step of a slot's life: sealed, closed, emptied. A slot with an open job stays. This file ends all jobs of the database.
CREATE TEMP TABLE before AS SELECT * FROM awa.queue_stats;
SELECT slot AS old FROM awa.ring_status WHERE state = 'current' \gset
SELECT awa_internal.seal() LIKE 'sealed:%' AS sealed;
SELECT awa_internal.close(:old);
SELECT state, open_jobs > 0 AS open_jobs, bytes > 0 AS bytes, blocked_reason ~ '^\d+ jobs of queue \S+ have not ended, nor \d+ of \d+ other queues, oldest running since \d{4}-\d\d-\d\d \d\d:\d\d' AS blocked
FROM awa.ring_status WHERE slot = :old;
SELECT awa_internal.empty(:old, true) LIKE 'open: % of %' AS open;
-- Once every job has ended it can go.
SELECT count(*) > 0 AS ended FROM (
    SELECT f.changed FROM awa_internal.claims c, generate_series(0, c.n - 1) k,
           LATERAL awa.cancel_claimed(array[(c.claim_no << 16) | (c.slot::bigint << 10) | k]) f WHERE f.changed) x;
DO $$
BEGIN
    PERFORM awa.resume_queue(queue) FROM awa.queues WHERE paused;
    WHILE EXISTS (SELECT FROM awa.queue_stats WHERE ready > 0) LOOP
        PERFORM awa.complete(ARRAY(SELECT receipt FROM awa.claim_from(ARRAY(SELECT queue FROM awa.queue_stats WHERE ready > 0), 1000)));
    END LOOP;
END $$;
SELECT awa_internal.empty(:old, true);
SELECT awa_internal.empty(:old, true), awa_internal.close(:old);
SELECT state, ready_rows, open_jobs FROM awa.ring_status WHERE slot = :old;
-- Its jobs are gone; the totals live on.
SELECT args, state FROM awa.jobs WHERE queue = 'r.q' ORDER BY args::int;
SELECT b.queue FROM before b JOIN awa.queue_stats s USING (queue)
WHERE s.enqueued_total <> b.enqueued_total OR s.completed_total <> b.completed_total + b.ready OR s.ready <> 0 OR s.running <> 0;
SELECT enqueued_total, completed_total, cancelled, stale_total FROM awa.queue_stats WHERE queue = 'r.q';
SELECT state, changed FROM awa.complete(t.receipts('r.q', '1'));

-- Channels of LISTEN: 63 bytes are a channel's limit.
SELECT n, awa.channel(n), length(awa.channel(n)) FROM unnest(array['q', 'Ä "x"', repeat('x', 59), repeat('x', 60), repeat('ä', 30)]) n;
SELECT library = sql AS same_version, extra FROM awa.version();
