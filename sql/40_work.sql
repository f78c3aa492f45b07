-- Workers.

CREATE FUNCTION awa.claim (
    queue text,
    max_jobs bigint DEFAULT 1,
    worker text DEFAULT NULL,
    lease interval DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, args jsonb, priority integer, effective_priority integer,
    attempt integer, max_attempts integer, ordering_key text, unique_key text, tags text[], metadata jsonb,
    checkpoint jsonb, callback jsonb, last_error jsonb, run_at timestamptz, enqueued_at timestamptz,
    claimed_at timestamptz, lease_until timestamptz, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_claim'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.claim (text, bigint, text, interval, jsonb) IS
'Takes up to max_jobs jobs of a queue, in lane order, and returns one row per job. max_jobs is the limit; a LIMIT over it only hides what it holds. worker is a name for the log. lease (default the queue''s) is how long the jobs are held. Fewer rows than asked does not mean empty. Does not wait. Unknown queue: no rows and one warning a session.';

CREATE FUNCTION awa.claim_from (
    queues text[],
    max_jobs bigint DEFAULT 1,
    worker text DEFAULT NULL,
    lease interval DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, args jsonb, priority integer, effective_priority integer,
    attempt integer, max_attempts integer, ordering_key text, unique_key text, tags text[], metadata jsonb,
    checkpoint jsonb, callback jsonb, last_error jsonb, run_at timestamptz, enqueued_at timestamptz,
    claimed_at timestamptz, lease_until timestamptz, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_claim_from'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.claim_from (text[], bigint, text, interval, jsonb) IS
'awa.claim over several queues in one call: each queue is given its share of max_jobs first, then what is left goes to who has more.';

CREATE FUNCTION awa.complete_and_claim (
    receipts bigint[],
    queues text[],
    max_jobs bigint DEFAULT 1,
    worker text DEFAULT NULL,
    lease interval DEFAULT NULL,
    outputs jsonb[] DEFAULT NULL,
    strict boolean DEFAULT false,
    follow_ups jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, args jsonb, priority integer, effective_priority integer,
    attempt integer, max_attempts integer, ordering_key text, unique_key text, tags text[], metadata jsonb,
    checkpoint jsonb, callback jsonb, last_error jsonb, run_at timestamptz, enqueued_at timestamptz,
    claimed_at timestamptz, lease_until timestamptz, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_complete_and_claim'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.complete_and_claim (bigint[], text[], bigint, text, interval, jsonb[], boolean, jsonb, jsonb) IS
'Completes receipts, then claims up to max_jobs jobs: one statement and one commit per batch. Returns the claimed jobs. With strict, a receipt that is stale raises 55000 and nothing happens; without, stale ones are counted in awa.queue_stats.stale_total.';

CREATE FUNCTION awa.complete (
    receipts bigint[],
    outputs jsonb[] DEFAULT NULL,
    strict boolean DEFAULT false,
    follow_ups jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, attempt integer, state text, run_at timestamptz,
    changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_complete'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.complete (bigint[], jsonb[], boolean, jsonb, jsonb) IS
'Ends attempts as completed, inside the caller''s transaction. One row per receipt in input order: state completed, or stale (not held any more: nothing was changed), or unknown. A receipt that was completed before comes back completed with changed = false. strict: a stale receipt raises 55000. Waits for another open transaction that finishes the same attempt (lock_timeout applies; two sessions finishing in opposite order may get 40P01: try again).';

CREATE FUNCTION awa.fail (
    receipts bigint[],
    error text DEFAULT NULL,
    retry_in interval DEFAULT NULL,
    permanent boolean DEFAULT false,
    details jsonb[] DEFAULT NULL,
    strict boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, attempt integer, state text, run_at timestamptz,
    changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_fail'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.fail (bigint[], text, interval, boolean, jsonb[], boolean, jsonb) IS
'Ends attempts as failed. A job with attempts left is retried after its queue''s backoff, or after retry_in; else, or with permanent, it ends as failed and is kept in awa.dead_letters. error (cut to 8 kB) and details (one jsonb per receipt) are kept with the job, the last 10. One row per receipt: state retryable with run_at, or failed, cancelled (somebody asked for it), stale, unknown. A receipt that was failed before comes back with changed = false. strict: a stale receipt raises 55000.';

CREATE FUNCTION awa.snooze (
    receipts bigint[],
    delay interval,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, attempt integer, state text, run_at timestamptz,
    changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_snooze'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.snooze (bigint[], interval, jsonb) IS
'Puts running jobs off by delay; the attempt does not count. One row per receipt: state scheduled with run_at.';

CREATE FUNCTION awa.release (
    receipts bigint[],
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, attempt integer, state text, run_at timestamptz,
    changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_release'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.release (bigint[], jsonb) IS
'Gives running jobs back to the tail of their lane, ready at once; the attempt does not count (for a worker that shuts down). The job keeps its id and gets a new receipt with its next claim. It loses its place in the lane.';

CREATE FUNCTION awa.cancel_claimed (
    receipts bigint[],
    reason text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (
    receipt bigint, job_id bigint, queue text, kind text, attempt integer, state text, run_at timestamptz,
    changed boolean, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_cancel_claimed'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.cancel_claimed (bigint[], text, jsonb) IS
'Ends attempts as cancelled, because the handler decided so. reason is kept with the closure.';

CREATE FUNCTION awa.heartbeat (
    receipts bigint[],
    lease interval DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS TABLE (receipt bigint, status text, lease_until timestamptz, extra jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_heartbeat'
VOLATILE PARALLEL UNSAFE ROWS 20;
COMMENT ON FUNCTION awa.heartbeat (bigint[], interval, jsonb) IS
'Extends the leases of running attempts to lease from now (default: the length that the claim was given), never to earlier than they end already, and says of each receipt, in input order: held; cancelled (still held, but somebody asked to cancel the job: stop and report); lost (ended, rescued or unknown: stop, nothing that is reported counts any more). lease_until is null where it is lost. Errors: 22023 lease not positive.';

CREATE FUNCTION awa.set_progress (
    receipt bigint,
    percent bigint DEFAULT NULL,
    message text DEFAULT NULL,
    checkpoint jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_set_progress'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.set_progress (bigint, bigint, text, jsonb, jsonb) IS
'Stores how far a running attempt is, in percent (0 to 100), a message (up to 8 kB) and a checkpoint that the job brings along to its next attempt; what is null stays as it was. It does not extend the lease. Returns held, cancelled or lost as awa.heartbeat does. Errors: 22004 receipt null, 22023 percent out of range, 54000 over a limit.';

CREATE FUNCTION awa.park (
    receipt bigint,
    timeout interval DEFAULT '1 h',
    options jsonb DEFAULT NULL
) RETURNS uuid
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_park'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.park (bigint, interval, jsonb) IS
'Waits for an external callback. 0A000 until built.';

CREATE FUNCTION awa.resume_parked (
    token uuid,
    payload jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_resume_parked'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.resume_parked (uuid, jsonb, jsonb) IS
'Resumes a parked job. 0A000 until built.';

CREATE FUNCTION awa.fail_parked (
    token uuid,
    error text DEFAULT NULL,
    detail jsonb DEFAULT NULL,
    permanent boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_fail_parked'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.fail_parked (uuid, text, jsonb, boolean, jsonb) IS
'Fails a parked job. 0A000 until built.';

CREATE PROCEDURE awa.wait (
    queues text[],
    timeout interval DEFAULT '10 s',
    INOUT ready boolean DEFAULT NULL,
    options jsonb DEFAULT NULL
)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_wait';
COMMENT ON PROCEDURE awa.wait (text[], interval, boolean, jsonb) IS
'Waits until a queue may have a job to claim (ready is true) or timeout (up to 24 h) is over (false), and at most until half a second before statement_timeout. Takes nothing: awa.claim does. Holds no snapshot while it waits. Preloaded it is woken by commits, else it looks every 10 to 200 ms. Paused queues do not count; for an unknown one it warns once a session and waits. 25001 inside a transaction block, 22023 bad timeout.';

CREATE PROCEDURE awa.wait_for (
    job_id bigint,
    timeout interval DEFAULT '10 s',
    INOUT state text DEFAULT NULL,
    INOUT output jsonb DEFAULT NULL,
    INOUT error jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_wait_for';
COMMENT ON PROCEDURE awa.wait_for (bigint, interval, text, jsonb, jsonb, jsonb) IS
'Waits until a job has ended. 0A000 until built.';
