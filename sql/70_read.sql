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
    queue_id integer, ready bigint, scheduled bigint, retryable bigint, overdue bigint, running bigint, completed bigint,
    failed bigint, cancelled bigint, dead_letters bigint, oldest_ready_at timestamptz, enqueued_total bigint,
    completed_total bigint, failed_total bigint, retried_total bigint, rescued_total bigint, stale_total bigint)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_queue_counts'
STABLE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa_internal.queue_counts () IS
'Counts per queue under one snapshot, the latest. Reads rows of segments, claims and closures (not jobs) of the slots that are not finished, and stored sums for the rest.';

CREATE VIEW awa.queue_stats AS
SELECT q.name AS queue,
       q.paused_at IS NOT NULL AS paused,
       COALESCE(c.ready, 0) AS ready,
       COALESCE(c.scheduled, 0) AS scheduled,
       COALESCE(c.retryable, 0) AS retryable,
       0::bigint AS blocked,
       0::bigint AS waiting,
       COALESCE(c.overdue, 0) AS overdue,
       COALESCE(c.running, 0) AS running,
       COALESCE(c.completed, 0) AS completed,
       CASE WHEN (q.settings ->> 'dead_letters')::boolean IS FALSE THEN COALESCE(c.failed, 0)
            ELSE COALESCE(c.dead_letters, 0) END AS failed,
       COALESCE(c.cancelled, 0) AS cancelled,
       date_part('epoch', clock_timestamp() - c.oldest_ready_at) AS oldest_ready_seconds,
       COALESCE(c.enqueued_total, 0) AS enqueued_total,
       COALESCE(c.completed_total, 0) AS completed_total,
       COALESCE(c.failed_total, 0) AS failed_total,
       COALESCE(c.retried_total, 0) AS retried_total,
       COALESCE(c.rescued_total, 0) AS rescued_total,
       COALESCE(c.stale_total, 0) AS stale_total
FROM awa_internal.queues q
LEFT JOIN awa_internal.queue_counts() c USING (queue_id);
COMMENT ON VIEW awa.queue_stats IS
'Exact counts per queue, as of one moment: the latest committed state and what the own transaction did, whatever its isolation level. ready, running, scheduled and retryable jobs are those that will run or do; overdue: deferred more than 5 s past their run_at (counted up to 100,000 over all queues). completed and cancelled count attempts that ended so and are still retained (their slot is not emptied), one that was brought back by retry included, and one that was cancelled while deferred. failed counts the queue''s dead letters, or where it keeps none the retained failures. *_total only grow: jobs put in, attempts completed, failed for good, to be retried (after fail or after a lease ended), whose lease ended, and finishes that came too late (once a slot is emptied its receipts are stale, but nobody can tell their queue). oldest_ready_seconds: how long the first claimable job has waited. blocked and waiting are 0 in this version, which has no such jobs.';

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
    slot integer, generation bigint, state text, jobs bigint, open_jobs bigint, open_queue_id integer, open_of_queue bigint,
    other_queues bigint, running_since timestamptz, running_worker text, retained_until timestamptz, wanted_before bigint,
    grace_ends timestamptz)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_slot_counts'
STABLE PARALLEL UNSAFE ROWS 16;
COMMENT ON FUNCTION awa_internal.slot_counts () IS
'The live slots with their jobs and how many of them have not ended: the queue that has most of these, how many other queues have some, the oldest claim that runs. Of a finished slot: until when its jobs are retained, and, while an older snapshot may want it, the transaction id that snapshot must reach and the end of awa_queue.snapshot_grace.';

CREATE VIEW awa.ring_status AS
WITH tables AS (
    SELECT c.oid, c.relname, substring(c.relname FROM '[0-9]+$')::integer AS slot,
           pg_total_relation_size(c.oid) AS bytes
    FROM pg_class c
    WHERE c.relnamespace = 'awa_internal'::regnamespace AND c.relkind = 'r'
      AND c.relname ~ '^(ready|segments|claims|closures)_[0-9]+$'
), slots AS (
    SELECT t.slot, c.generation, COALESCE(c.state, 'empty') AS state, COALESCE(c.jobs, 0) AS ready_rows,
           COALESCE(c.open_jobs, 0) AS open_jobs, t.bytes, q.name AS open_queue, c.open_of_queue, c.other_queues,
           c.running_since, c.running_worker, c.retained_until, c.grace_ends,
           (c.wanted_before % 4294967296)::text::xid AS wanted_before,
           CASE WHEN c.state = 'closed' AND c.open_jobs = 0 AND (c.retained_until <= clock_timestamp() OR c.retained_until IS NULL)
                THEN true ELSE false END AS due
    FROM (SELECT slot, sum(bytes)::bigint AS bytes FROM tables GROUP BY slot) t
    LEFT JOIN awa_internal.slot_counts() c USING (slot)
    LEFT JOIN awa_internal.queues q ON q.queue_id = c.open_queue_id
), holders AS (
    -- Locks that closing (SHARE on the segments) or emptying (ACCESS EXCLUSIVE on all four) would have to wait for.
    SELECT s.slot, 1 AS rank, COALESCE(a.xact_start, p.prepared) AS since,
           CASE
               WHEN p.gid IS NOT NULL THEN format('prepared transaction ''%s''', p.gid)
               WHEN l.pid IS NULL THEN 'a prepared transaction'
               WHEN l.mode = 'RowExclusiveLock' THEN format('open transaction of pid %s', l.pid)
               ELSE format('lock of pid %s', l.pid)
           END AS who,
           CASE
               WHEN l.mode = 'RowExclusiveLock' THEN ' has written into it'
               ELSE format(' on %s', t.relname)
           END AS what,
           concat_ws(', ',
               CASE WHEN a.backend_type = 'autovacuum worker' THEN 'autovacuum'
                    WHEN a.query ~* '^\s*vacuum' THEN 'VACUUM'
                    WHEN a.application_name <> '' THEN 'application ' || a.application_name END,
               'user ' || COALESCE(a.usename, p.owner)) AS details,
           NULL::text AS until
    FROM slots s
    JOIN tables t USING (slot)
    JOIN pg_locks l ON l.relation = t.oid AND l.granted
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL AND EXISTS (
         SELECT FROM pg_locks x WHERE x.locktype = 'transactionid' AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
         AND x.transactionid = p.transaction)
    WHERE CASE
              WHEN s.state = 'sealed' THEN t.relname ~ '^segments_' AND l.mode NOT IN ('AccessShareLock', 'RowShareLock', 'ShareLock')
              WHEN s.due AND s.wanted_before IS NULL THEN l.pid IS DISTINCT FROM pg_backend_pid() OR l.mode <> 'AccessShareLock'
              ELSE false
          END
    UNION ALL
    -- Snapshots, and transactions that keep the snapshots of others old.
    SELECT s.slot, 0, a.xact_start, format('snapshot of pid %s', a.pid), '',
           concat_ws(', ', CASE WHEN a.backend_type = 'walsender' THEN 'standby with hot_standby_feedback' END,
                     'application ' || NULLIF(a.application_name, ''), 'user ' || a.usename),
           to_char(s.grace_ends, 'YYYY-MM-DD HH24:MI')
    FROM slots s
    JOIN pg_stat_activity a ON (a.datname = current_database() OR a.backend_type = 'walsender')
         AND a.backend_type <> 'autovacuum worker'
         AND GREATEST(age(a.backend_xmin), age(a.backend_xid)) > age(s.wanted_before)
    WHERE s.due AND s.wanted_before IS NOT NULL
    UNION ALL
    SELECT s.slot, 0, p.prepared, format('prepared transaction ''%s''', p.gid), '', 'user ' || p.owner,
           to_char(s.grace_ends, 'YYYY-MM-DD HH24:MI')
    FROM slots s
    JOIN pg_prepared_xacts p ON p.database = current_database() AND age(p.transaction) > age(s.wanted_before)
    WHERE s.due AND s.wanted_before IS NOT NULL
    UNION ALL
    SELECT s.slot, 0, NULL, format('xmin of replication slot ''%s''', r.slot_name), '', NULL,
           to_char(s.grace_ends, 'YYYY-MM-DD HH24:MI')
    FROM slots s
    JOIN pg_replication_slots r ON age(r.xmin) > age(s.wanted_before)
    WHERE s.due AND s.wanted_before IS NOT NULL
), oldest AS (
    -- The oldest for each slot, and how many there are beside it.
    SELECT DISTINCT ON (h.slot) h.slot,
           h.who
           || COALESCE(', ' || CASE WHEN g.age < 120 THEN g.age || ' s old' WHEN g.age < 7200 THEN g.age / 60 || ' min old'
                                    WHEN g.age < 172800 THEN g.age / 3600 || ' h old' ELSE g.age / 86400 || ' d old' END, '')
           || CASE WHEN h.what LIKE ' has%' THEN ',' ELSE '' END || h.what
           || COALESCE(' (' || NULLIF(h.details, '') || ')', '')
           || CASE WHEN n.others > 0 THEN format(', and %s more', n.others) ELSE '' END
           || COALESCE(': emptied at ' || h.until || ' at the latest', '') AS words
    FROM holders h
    CROSS JOIN LATERAL (SELECT GREATEST(floor(date_part('epoch', clock_timestamp() - h.since)), 0)::bigint AS age) g
    CROSS JOIN LATERAL (SELECT count(DISTINCT o.who) - 1 AS others FROM holders o WHERE o.slot = h.slot) n
    ORDER BY h.slot, h.what NOT LIKE ' has%', h.since NULLS LAST, h.who
)
SELECT s.slot, s.generation, s.state, s.ready_rows, s.open_jobs, s.bytes,
       CASE
           WHEN s.state = 'sealed' THEN COALESCE(o.words, 'nothing: closed by the next run of maintenance')
           WHEN s.state = 'closed' AND s.open_jobs > 0 THEN
               format('%s %s of queue %s %s not ended', s.open_of_queue, CASE s.open_of_queue WHEN 1 THEN 'job' ELSE 'jobs' END,
                      s.open_queue, CASE s.open_of_queue WHEN 1 THEN 'has' ELSE 'have' END)
               || CASE WHEN s.other_queues > 0
                       THEN format(', nor %s of %s other queues', s.open_jobs - s.open_of_queue, s.other_queues) ELSE '' END
               || CASE WHEN s.running_since IS NULL THEN ', none is running'
                       ELSE format(', oldest running since %s', to_char(s.running_since, 'YYYY-MM-DD HH24:MI'))
                            || COALESCE(' (worker ' || s.running_worker || ')', '') END
           WHEN s.state = 'closed' AND NOT s.due THEN format('retained until %s', to_char(s.retained_until, 'YYYY-MM-DD HH24:MI'))
           WHEN s.state = 'closed' THEN
               COALESCE(o.words,
                        CASE WHEN s.wanted_before IS NOT NULL THEN
                            'an older snapshot (a member of pg_read_all_stats sees whose): emptied at '
                            || to_char(s.grace_ends, 'YYYY-MM-DD HH24:MI') || ' at the latest' END,
                        'nothing: emptied by the next run of maintenance')
       END AS blocked_reason
FROM slots s
LEFT JOIN oldest o USING (slot);
COMMENT ON VIEW awa.ring_status IS
'The slots of the ring: current, sealed, closed or empty, how many jobs each holds (ready_rows), how many of them have not ended, its bytes with indexes, and what keeps it from being closed or emptied: who, by pid, for how long. Roles without pg_read_all_stats see less of other sessions.';

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
