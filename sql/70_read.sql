-- Readers.

CREATE FUNCTION awa.has_feature (feature text, options jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_has_feature'
STABLE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.has_feature (text, jsonb) IS
'Whether this version can do something, by the name of a verb or parameter. Ask this rather than a version number.';

CREATE FUNCTION awa.version (options jsonb DEFAULT NULL) RETURNS TABLE (library text, sql text, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_version'
STABLE PARALLEL UNSAFE ROWS 1;
COMMENT ON FUNCTION awa.version (jsonb) IS
'Version of the loaded library and of the SQL objects; they differ between a package upgrade and ALTER EXTENSION.';

CREATE FUNCTION awa.job (job_id bigint, options jsonb DEFAULT NULL) RETURNS TABLE (
    job_id bigint, queue text, kind text, state text, priority integer, attempt integer, max_attempts integer,
    args jsonb, ordering_key text, unique_key text, tags text[], metadata jsonb, progress jsonb, output jsonb,
    errors jsonb, run_at timestamptz, enqueued_at timestamptz, claimed_at timestamptz, lease_until timestamptz,
    finished_at timestamptz, worker text, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_job'
STABLE PARALLEL UNSAFE ROWS 1;
COMMENT ON FUNCTION awa.job (bigint, jsonb) IS
'One job by its id, as in awa.jobs, or no row where it is unknown or its slot was emptied. A few index probes per live slot, whatever the number of jobs.';

CREATE FUNCTION awa_internal.jobs () RETURNS TABLE (
    job_id bigint, queue text, kind text, state text, priority integer, attempt integer, max_attempts integer,
    args jsonb, ordering_key text, unique_key text, tags text[], metadata jsonb, progress jsonb, output jsonb,
    errors jsonb, run_at timestamptz, enqueued_at timestamptz, claimed_at timestamptz, lease_until timestamptz,
    finished_at timestamptz, worker text)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_jobs'
STABLE PARALLEL UNSAFE ROWS 100000;
COMMENT ON FUNCTION awa_internal.jobs () IS 'All jobs of the live slots.';

CREATE VIEW awa.jobs AS SELECT * FROM awa_internal.jobs();
COMMENT ON VIEW awa.jobs IS
'All jobs that are waiting, running or still retained. Reads everything: use awa.job(job_id) for one job and awa.queue_stats for counts.';

CREATE FUNCTION awa_internal.queue_counts () RETURNS TABLE (
    queue_id integer, ready bigint, running bigint, completed bigint, failed bigint, cancelled bigint, released bigint,
    stale bigint, entries bigint, oldest_ready_at timestamptz)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_queue_counts'
STABLE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa_internal.queue_counts () IS
'Counts per queue over the live slots, as of the latest committed state. Reads one row per enqueue call, claim and closure, not per job.';

CREATE VIEW awa.queue_stats AS
SELECT q.name AS queue,
       q.paused_at IS NOT NULL AS paused,
       COALESCE(c.ready, 0) AS ready,
       0::bigint AS scheduled,
       0::bigint AS retryable,
       0::bigint AS blocked,
       0::bigint AS waiting,
       0::bigint AS overdue,
       COALESCE(c.running, 0) AS running,
       COALESCE(c.completed, 0) AS completed,
       COALESCE(c.failed, 0) AS failed,
       COALESCE(c.cancelled, 0) AS cancelled,
       date_part('epoch', clock_timestamp() - c.oldest_ready_at) AS oldest_ready_seconds,
       COALESCE(c.entries, 0) - COALESCE(c.released, 0) + t.enqueued AS enqueued_total,
       COALESCE(c.completed, 0) + t.completed AS completed_total,
       COALESCE(c.failed, 0) + t.failed AS failed_total,
       0::bigint AS retried_total,
       0::bigint AS rescued_total,
       COALESCE(c.stale, 0) + t.stale AS stale_total
FROM awa_internal.queues q
LEFT JOIN awa_internal.queue_counts() c USING (queue_id)
CROSS JOIN LATERAL (
    SELECT COALESCE(sum(n) FILTER (WHERE outcome = 'e'), 0)::bigint
           - COALESCE(sum(n) FILTER (WHERE outcome = 'r'), 0)::bigint AS enqueued,
           COALESCE(sum(n) FILTER (WHERE outcome = 'c'), 0)::bigint AS completed,
           COALESCE(sum(n) FILTER (WHERE outcome = 'f'), 0)::bigint AS failed,
           COALESCE(sum(n) FILTER (WHERE outcome = 's'), 0)::bigint AS stale
    FROM awa_internal.queue_totals WHERE queue_id = q.queue_id) t;
COMMENT ON VIEW awa.queue_stats IS
'Exact counts per queue. ready, running, completed, failed and cancelled are of the live slots; *_total only grow. oldest_ready_seconds: how long the first claimable job has waited. scheduled, retryable, blocked, waiting, overdue, retried_total and rescued_total are 0 in this version, which has no such jobs.';

CREATE VIEW awa.queues AS
SELECT name AS queue, settings, paused_at IS NOT NULL AS paused, paused_by, pause_reason AS reason, auto_created, created_at
FROM awa_internal.queues;
COMMENT ON VIEW awa.queues IS 'Queues and the settings that differ from the defaults.';

CREATE VIEW awa.dead_letters AS
SELECT d.job_id, q.name AS queue, COALESCE(d.kind, q.name) AS kind, (d.lane_id % 256 / 64 + 1)::integer AS priority,
       d.attempt::integer AS attempt, d.max_attempts::integer AS max_attempts, d.args, (d.rest).ordering_key AS ordering_key,
       (d.rest).unique_key AS unique_key, (d.rest).tags AS tags, (d.rest).metadata AS metadata, (d.rest).errors AS errors,
       (d.rest).enqueued_at AS enqueued_at, d.failed_at
FROM awa_internal.dead_letters d JOIN awa_internal.queues q ON q.queue_id = d.lane_id >> 8;
COMMENT ON VIEW awa.dead_letters IS
'Jobs that failed for good (attempts used up, or failed as permanent), with the errors of their last ten attempts. They go after their queue''s failed_retention.';

CREATE FUNCTION awa_internal.slot_counts () RETURNS TABLE (
    slot integer, generation bigint, state text, jobs bigint, open_jobs bigint)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_slot_counts'
STABLE PARALLEL UNSAFE ROWS 16;
COMMENT ON FUNCTION awa_internal.slot_counts () IS 'The live slots with their jobs and how many of them have not ended.';

CREATE VIEW awa.ring_status AS
SELECT s.slot,
       c.generation,
       COALESCE(c.state, 'empty') AS state,
       COALESCE(c.jobs, 0) AS ready_rows,
       COALESCE(c.open_jobs, 0) AS open_jobs,
       pg_total_relation_size(format('awa_internal.ready_%s', s.slot)::regclass)
       + pg_total_relation_size(format('awa_internal.segments_%s', s.slot)::regclass)
       + pg_total_relation_size(format('awa_internal.claims_%s', s.slot)::regclass)
       + pg_total_relation_size(format('awa_internal.closures_%s', s.slot)::regclass) AS bytes,
       CASE
           WHEN c.state = 'sealed' THEN
               COALESCE(
                   (SELECT CASE WHEN l.pid IS NULL THEN 'a prepared transaction has written into it'
                                ELSE format('open transaction of pid %s, %s old, has written into it', l.pid,
                                            date_trunc('second', clock_timestamp() - a.xact_start)) END
                    FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
                    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                      AND l.relation = format('awa_internal.segments_%s', s.slot)::regclass
                      AND l.mode = 'RowExclusiveLock' AND l.granted
                    ORDER BY a.xact_start NULLS FIRST LIMIT 1),
                   'to be closed by the next CALL awa.maintain()')
           WHEN c.state = 'closed' AND c.open_jobs > 0 THEN format('%s jobs have not ended', c.open_jobs)
           WHEN c.state = 'closed' THEN 'finished: emptied when retention is over and no older snapshot needs it'
       END AS blocked_reason
FROM (SELECT substring(relname FROM '[0-9]+$')::integer AS slot
      FROM pg_class WHERE relnamespace = 'awa_internal'::regnamespace AND relkind = 'r' AND relname ~ '^ready_[0-9]+$') s
LEFT JOIN awa_internal.slot_counts() c USING (slot);
COMMENT ON VIEW awa.ring_status IS
'The slots of the ring: current, sealed, closed or empty, how many jobs each holds, and what keeps it from being closed or emptied.';

CREATE FUNCTION awa.channel (queue text, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_channel'
IMMUTABLE PARALLEL SAFE;
COMMENT ON FUNCTION awa.channel (text, jsonb) IS
'The channel that a queue''s NOTIFY uses: awa: and the name where that is at most 63 bytes, else awa:# and the md5 of the name.';

CREATE FUNCTION awa.why (job_id bigint, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_why'
STABLE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.why (bigint, jsonb) IS 'Why a job has not run, in one sentence. 0A000 until built.';

CREATE FUNCTION awa.doctor (options jsonb DEFAULT NULL) RETURNS TABLE (check_name text, status text, detail text, remedy text, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_doctor'
STABLE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.doctor (jsonb) IS 'Checks of the installation. 0A000 until built.';

CREATE FUNCTION awa.health (options jsonb DEFAULT NULL) RETURNS TABLE (queue text, verdict text, detail text, clear_in interval, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_health'
STABLE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.health (jsonb) IS 'A verdict per queue in words. 0A000 until built.';
