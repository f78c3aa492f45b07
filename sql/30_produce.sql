-- Producers. Nothing is granted to PUBLIC: see 90_rights.sql.

CREATE FUNCTION awa.enqueue (
    queue text,
    args jsonb DEFAULT '{}',
    kind text DEFAULT NULL,
    priority bigint DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    max_attempts bigint DEFAULT NULL,
    ordering_key text DEFAULT NULL,
    unique_key text DEFAULT NULL,
    unique_by text[] DEFAULT NULL,
    unique_until text DEFAULT NULL,
    unique_for interval DEFAULT NULL,
    on_duplicate text DEFAULT NULL,
    tags text[] DEFAULT NULL,
    metadata jsonb DEFAULT NULL,
    run_in interval DEFAULT NULL,
    lease interval DEFAULT NULL,
    expires_in interval DEFAULT NULL,
    after bigint[] DEFAULT NULL,
    on_parent_failure text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_enqueue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.enqueue (text, jsonb, text, bigint, timestamptz, bigint, text, text, text[], text, interval, text, text[], jsonb, interval, interval, interval, bigint[], text, jsonb) IS
'Puts one job into a queue and returns its id. kind defaults to the queue''s name, priority (1 most urgent to 4) and max_attempts (1 to 1,000) to the queue''s. run_at in the past means now; in the future, and run_in: scheduled. A job that waits longer than expires_in (from now, or from its run time) ends as cancelled with reason expired. uniqueness, lease, after: 0A000 until built. Errors: 22004 queue or args null, 22023 bad value, 54000 over a limit, 42704 unknown queue where queues are not created by themselves, 55P03 another transaction is just creating the queue.';

CREATE FUNCTION awa.enqueue_batch (
    queue text,
    args jsonb[],
    kind text DEFAULT NULL,
    priority bigint DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    max_attempts bigint DEFAULT NULL,
    ordering_keys text[] DEFAULT NULL,
    unique_keys text[] DEFAULT NULL,
    unique_by text[] DEFAULT NULL,
    unique_until text DEFAULT NULL,
    unique_for interval DEFAULT NULL,
    on_duplicate text DEFAULT NULL,
    tags text[] DEFAULT NULL,
    metadata jsonb DEFAULT NULL,
    run_in interval DEFAULT NULL,
    lease interval DEFAULT NULL,
    expires_in interval DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS bigint[]
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_enqueue_batch'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.enqueue_batch (text, jsonb[], text, bigint, timestamptz, bigint, text[], text[], text[], text, interval, text, text[], jsonb, interval, interval, interval, jsonb) IS
'Puts many jobs of one queue and kind into it, one per element of args, and returns their ids in that order. The fast path: one call, one lane lock for microseconds. NULL or empty args: no jobs. At most 100,000 jobs a call (54000). A null element: 22004; ordering_keys of another length: 22023.';

CREATE FUNCTION awa.enqueue_jobs (
    jobs jsonb,
    options jsonb DEFAULT NULL
) RETURNS TABLE (idx integer, job_id bigint, status text, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_enqueue_jobs'
VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa.enqueue_jobs (jsonb, jsonb) IS
'Puts jobs of different queues into them: jobs is an array of objects whose keys are the parameters of awa.enqueue (an unknown key: 22023). Returns one row per job in input order, idx from 1, status ready. Lanes are visited in (queue, priority, shard) order, one lock at a time.';

CREATE FUNCTION awa.cancel (
    job_ids bigint[],
    reason text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (job_id bigint, queue text, kind text, state text, changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_cancel'
VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa.cancel (bigint[], text, jsonb) IS
'Cancels jobs by id and returns one row per id, in input order. A waiting or deferred job ends at once (state cancelled); a running one is asked to stop (state running, changed true): its worker learns of it by heartbeat, and its report ends the job as cancelled. A finished job keeps its state (changed false), an unknown or null id comes back as unknown. Waits for open transactions that are taking, finishing or cancelling one of the jobs (lock_timeout applies). More than 100,000 ids: 54000.';

CREATE FUNCTION awa.cancel_by_key (
    queue text,
    unique_key text,
    reason text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (job_id bigint, queue text, kind text, state text, changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_cancel_by_key'
VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa.cancel_by_key (text, text, text, jsonb) IS
'Cancels the job that holds a unique key. 0A000 until built.';

CREATE FUNCTION awa.retry (
    job_ids bigint[],
    run_at timestamptz DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (job_id bigint, queue text, kind text, state text, changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_retry'
VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION awa.retry (bigint[], timestamptz, jsonb) IS
'Lets jobs run again and returns one row per id, in input order. Scheduled and retryable jobs become ready now (or at run_at), their attempt kept; failed and cancelled ones start over at attempt 1 with the same id, their errors kept, as long as they are retained; a waiting one is put off where run_at is in the future. Running and completed jobs stay as they are (changed false), an unknown or null id comes back as unknown. Waits for open transactions that are moving one of the jobs (lock_timeout applies). More than 100,000 ids: 54000; infinite run_at: 22023.';
