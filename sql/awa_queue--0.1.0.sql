\echo Use "CREATE EXTENSION awa_queue" to load this file. \quit

-- 10_schemas.sql
-- Complain if the script is sourced in psql rather than by CREATE EXTENSION.
\echo Use "CREATE EXTENSION awa_queue" to load this file. \quit

-- The control file names pg_catalog, so the search_path of this script is pg_catalog alone and nothing
-- that somebody created beforehand can be picked up by an unqualified name. Every object below is
-- qualified, and CREATE SCHEMA without IF NOT EXISTS fails where somebody prepared a schema of that name.

-- Names and keys are compared and hashed as UTF-8.
DO $encoding$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'awa_queue needs a database in encoding UTF8, not %', current_setting('server_encoding')
            USING ERRCODE = 'feature_not_supported', HINT = 'Create the database with ENCODING ''UTF8''.';
    END IF;
END
$encoding$;

CREATE SCHEMA awa;
COMMENT ON SCHEMA awa IS 'awa_queue: the API. Tables live in awa_internal.';

CREATE SCHEMA awa_internal;
COMMENT ON SCHEMA awa_internal IS 'awa_queue: tables and maintenance steps. Nobody needs USAGE here.';

-- 20_tables.sql
-- Identity of this installation. Not dumped: a restored database gets an identity of its own, and
-- everything that a backend remembers is dropped when the incarnation it was read under differs.
CREATE TABLE awa_internal.world (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    incarnation bigint NOT NULL,
    protocol    integer NOT NULL,
    layout      integer NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    system_id   bigint,
    database    oid
);
COMMENT ON TABLE awa_internal.world IS
'Incarnation of this installation, the protocol and layout numbers that the library must know, and the server and database whose it is: null before the first verb. Where they are another''s (a restore, a clone), no worker does anything before a verb or awa_internal.adopt().';
INSERT INTO awa_internal.world (incarnation, protocol, layout)
VALUES (hashtextextended(gen_random_uuid()::text, 0), 1, 1);

CREATE SEQUENCE awa_internal.queue_ids AS integer;
CREATE SEQUENCE awa_internal.entry_ids AS bigint INCREMENT 1024 MINVALUE 1024 START 1024;
CREATE SEQUENCE awa_internal.claim_blocks AS bigint;
COMMENT ON SEQUENCE awa_internal.entry_ids IS 'Blocks of 1,024 entry ids; each backend draws one at a time.';
COMMENT ON SEQUENCE awa_internal.claim_blocks IS 'Blocks of 64 claim numbers, never below 512 a second since 2026-01-01.';

CREATE TABLE awa_internal.queues (
    queue_id     integer PRIMARY KEY,
    name         text COLLATE "C" NOT NULL UNIQUE,
    settings     jsonb NOT NULL DEFAULT '{}',
    paused_at    timestamptz,
    paused_by    text,
    pause_reason text,
    auto_created boolean NOT NULL DEFAULT false,
    created_at   timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE awa_internal.queues IS 'A queue: its name and policy. Ids are never reused.';

CREATE TABLE awa_internal.lanes (
    lane_id          bigint PRIMARY KEY,
    appended_through bigint NOT NULL DEFAULT 0,
    claimed_through  bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE awa_internal.lanes IS
'What closed and emptied slots leave behind of a lane: no seq up to appended_through is ever given out again, and none up to claimed_through is looked at again. lane_id = queue_id * 256 + (priority - 1) * 64 + shard.';

CREATE TABLE awa_internal.ring (
    event_no    bigint PRIMARY KEY,
    slot        smallint NOT NULL CHECK (slot BETWEEN 0 AND 63),
    event       "char" NOT NULL CHECK (event IN ('o', 'c', 'e')),
    generation  bigint NOT NULL,
    incarnation bigint NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE awa_internal.ring IS
'Events of slots: o opened (and with it the slot before it sealed), c closed, e emptied. The last event of a slot is its state; with no event at all, slot 0 is open as generation 0.';

CREATE TABLE awa_internal.queue_totals (
    queue_id integer NOT NULL,
    outcome  "char" NOT NULL,
    n        bigint NOT NULL,
    PRIMARY KEY (queue_id, outcome)
);
COMMENT ON TABLE awa_internal.queue_totals IS
'Counts per queue that outlive slots: e entries and one row per closure outcome, of emptied slots; s stale finishes and capital letters count what is not in the logs (count_changes says which).';

-- What a slot holds, summed once it can not change any more, so that counting reads no log of a finished slot.
CREATE TABLE awa_internal.slot_sums (
    slot       smallint NOT NULL,
    generation bigint NOT NULL,
    lane_id    bigint NOT NULL,
    outcome    "char" NOT NULL,
    n          bigint NOT NULL,
    PRIMARY KEY (slot, generation, lane_id, outcome)
);
COMMENT ON TABLE awa_internal.slot_sums IS
'Counts of slots that are not emptied, per lane: e entries, written when the slot is closed, and one row per closure outcome, written when it is finished. Added to queue_totals when it is emptied.';

CREATE TABLE awa_internal.finished_slots (
    slot        smallint PRIMARY KEY,
    generation  bigint NOT NULL,
    incarnation bigint NOT NULL,
    ended_at    timestamptz,
    seen_after  bigint NOT NULL
);
COMMENT ON TABLE awa_internal.finished_slots IS
'Closed slots of which every job has ended: when the last one ended, and the transaction id (with its epoch, of this incarnation) that the oldest snapshot must have reached to see all of that.';

-- Counters that many sessions change at once would make them wait for each other: each adds a row, and
-- maintenance folds the rows into queue_totals.
CREATE TABLE awa_internal.count_changes (
    change_no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id  integer NOT NULL,
    what      "char" NOT NULL,
    n         bigint NOT NULL
);
COMMENT ON TABLE awa_internal.count_changes IS
'Changes of counts, not yet folded into queue_totals. What: S scheduled jobs in deferred, R retryable ones, D dead letters, B failed or cancelled jobs that were brought back by retry, s finishes that came too late.';

-- What few jobs have, kept in one nullable column: with more than eight columns every ready row that has
-- a null would cost eight bytes more. Its attributes can not be extended while a table uses the type, so
-- it is whole from the start, and `more` is the place for what comes later.
CREATE TYPE awa_internal.job_rest AS (
    ordering_key text,
    unique_key   text,
    tags         text[],
    metadata     jsonb,
    errors       jsonb,
    checkpoint   jsonb,
    run_at       timestamptz,
    enqueued_at  timestamptz,
    lease        interval,
    expires_at   timestamptz,
    more         jsonb
);

-- The four logs. Nothing in them is ever updated or deleted; the state of a job is derived from them.
-- Parents carry no index, so that a slot added later restores without a clash. Fixed-width columns come
-- first to save padding.
CREATE TABLE awa_internal.ready (
    entry_id     bigint NOT NULL,
    job_id       bigint,
    slot         smallint NOT NULL,
    attempt      smallint NOT NULL,
    max_attempts smallint NOT NULL,
    kind         text,
    args         jsonb NOT NULL,
    rest         awa_internal.job_rest
) PARTITION BY LIST (slot);
COMMENT ON TABLE awa_internal.ready IS
'One row per entry: one appearance of a job that may run. job_id is null while it equals entry_id, kind while it equals the queue''s name.';

CREATE TABLE awa_internal.segments (
    lane_id        bigint NOT NULL,
    first_seq      bigint NOT NULL,
    first_entry_id bigint NOT NULL,
    enqueued_at    timestamptz NOT NULL,
    slot           smallint NOT NULL,
    n              smallint NOT NULL,
    runs           bytea NOT NULL
) PARTITION BY LIST (slot);
COMMENT ON TABLE awa_internal.segments IS
'One row per lane and call: entries first_entry_id.. hold seqs first_seq.. of the lane. runs says where the rows lie (block, offset, count; 8 bytes each) and is only a hint.';

CREATE TABLE awa_internal.claims (
    claim_no   bigint NOT NULL,
    lane_id    bigint NOT NULL,
    first_seq  bigint NOT NULL,
    claimed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    slot       smallint NOT NULL,
    n          smallint NOT NULL,
    worker     text
) PARTITION BY LIST (slot);
COMMENT ON TABLE awa_internal.claims IS 'One row per contiguous range that was taken, at most 1,024 seqs, in the slot of its segments.';

CREATE TABLE awa_internal.closures (
    claim_no  bigint NOT NULL,
    closed_at timestamptz NOT NULL,
    slot      smallint NOT NULL,
    n         smallint NOT NULL,
    outcome   "char" NOT NULL,
    which     bytea,
    reason    text
) PARTITION BY LIST (slot);
COMMENT ON TABLE awa_internal.closures IS
'One row per claim (or part) that ended, and outcome: c completed, x cancelled, k cancelled on request, f failed, d failed when its lease ended, r released, t to be retried, l to be retried after its lease ended, z snoozed; q a request to cancel and b brought back by retry (these end nothing). which is a bitmap of indexes in the claim, null for all of it.';

-- Not dumped: it says how maintenance goes here.
CREATE TABLE awa_internal.duties (
    duty       text PRIMARY KEY,
    last_run   timestamptz NOT NULL,
    last_done  timestamptz,
    done       bigint NOT NULL DEFAULT 0,
    failures   integer NOT NULL DEFAULT 0,
    last_error text,
    failed_at  timestamptz
);
COMMENT ON TABLE awa_internal.duties IS
'Each duty of maintenance: when it last ran (noted once a minute while it finds nothing), when it last did something and how much in all, failures in a row and what the last one said.';

-- Jobs that may not run yet: scheduled ones, and those between two attempts.
CREATE TABLE awa_internal.deferred (
    job_id       bigint PRIMARY KEY,
    run_at       timestamptz NOT NULL,
    lane_id      bigint NOT NULL,
    attempt      smallint NOT NULL,
    max_attempts smallint NOT NULL,
    state        "char" NOT NULL CHECK (state IN ('s', 'r')),
    kind         text,
    args         jsonb NOT NULL,
    rest         awa_internal.job_rest
);
CREATE INDEX deferred_due ON awa_internal.deferred (run_at, job_id);
COMMENT ON TABLE awa_internal.deferred IS
'Jobs that become ready at run_at, with all they bring along. state: s scheduled (also snoozed), r retryable. attempt is the one that comes next; kind is null while it equals the queue''s name.';

-- Jobs that may only wait so long.
CREATE TABLE awa_internal.expiries (
    expires_at timestamptz NOT NULL,
    job_id     bigint NOT NULL,
    PRIMARY KEY (expires_at, job_id)
);
COMMENT ON TABLE awa_internal.expiries IS
'Until when jobs may wait (expires_in). A row goes when its time has come, whatever became of the job.';

-- Jobs that failed for good, kept for failed_retention.
CREATE TABLE awa_internal.dead_letters (
    job_id       bigint PRIMARY KEY,
    failed_at    timestamptz NOT NULL,
    lane_id      bigint NOT NULL,
    attempt      smallint NOT NULL,
    max_attempts smallint NOT NULL,
    kind         text,
    args         jsonb NOT NULL,
    rest         awa_internal.job_rest
);
CREATE INDEX dead_letters_by_queue ON awa_internal.dead_letters ((lane_id >> 8), failed_at);
COMMENT ON TABLE awa_internal.dead_letters IS 'Jobs that failed for good: attempts used up, or failed as permanent.';

-- Attempts that need more than their claim says: an extended lease, progress, a checkpoint.
CREATE TABLE awa_internal.attempts (
    claim_no    bigint NOT NULL,
    index       smallint NOT NULL,
    slot        smallint NOT NULL,
    lease_until timestamptz,
    percent     smallint,
    message     text,
    checkpoint  jsonb,
    PRIMARY KEY (claim_no, index)
) WITH (fillfactor = 60);
CREATE INDEX attempts_by_slot ON awa_internal.attempts (slot);
COMMENT ON TABLE awa_internal.attempts IS
'One row per attempt that sent a heartbeat or stored progress; index is the job''s in its claim. Gone with the slot of its claim. No index holds lease_until, so that heartbeats are HOT updates.';

-- How far the rescue has looked at the claims of a slot, and the claims below that which it has to look at
-- again. Neither is dumped: a restored database is looked at anew.
CREATE TABLE awa_internal.rescue_marks (
    slot          smallint PRIMARY KEY,
    generation    bigint NOT NULL,
    incarnation   bigint NOT NULL,
    through       timestamptz,
    swept_through timestamptz,
    swept_at      timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE awa_internal.rescue_marks IS
'Claims of the slot whose lease, as it was given, ends before through have ended or are in rescue_list. swept_through: how far the look at all of them has come that began after swept_at.';

CREATE TABLE awa_internal.rescue_list (
    claim_no bigint PRIMARY KEY,
    slot     smallint NOT NULL,
    due_at   timestamptz NOT NULL,
    tries    smallint NOT NULL,
    failures smallint NOT NULL
);
CREATE INDEX rescue_list_due ON awa_internal.rescue_list (due_at);
COMMENT ON TABLE awa_internal.rescue_list IS
'Claims whose lease, as it was given, is over and which are looked at again at due_at: a heartbeat extended them, another transaction is at them (tries in a row), or ending them failed (failures in a row).';

ALTER TABLE awa_internal.segments ALTER COLUMN runs SET STORAGE PLAIN;
ALTER TABLE awa_internal.closures ALTER COLUMN which SET STORAGE PLAIN;

DO $slots$
DECLARE
    log text;
BEGIN
    FOR s IN 0..15 LOOP
        FOREACH log IN ARRAY ARRAY['ready', 'segments', 'claims', 'closures'] LOOP
            EXECUTE format(
                'CREATE TABLE awa_internal.%1$I PARTITION OF awa_internal.%2$I FOR VALUES IN (%3$s)'
                ' WITH (autovacuum_enabled = off, vacuum_truncate = off%4$s)',
                log || '_' || s, log, s,
                CASE WHEN log IN ('ready', 'claims', 'closures')
                     THEN ', toast.autovacuum_enabled = off, toast.vacuum_truncate = off' ELSE '' END);
            PERFORM pg_extension_config_dump(format('awa_internal.%I', log || '_' || s), '');
        END LOOP;
        EXECUTE format('CREATE INDEX ON awa_internal.ready_%1$s (job_id) WHERE job_id IS NOT NULL', s);
        EXECUTE format('CREATE INDEX ON awa_internal.segments_%1$s (lane_id, first_seq)', s);
        EXECUTE format('CREATE INDEX ON awa_internal.segments_%1$s (first_entry_id)', s);
        EXECUTE format('CREATE INDEX ON awa_internal.claims_%1$s (lane_id, first_seq)', s);
        EXECUTE format('CREATE INDEX ON awa_internal.claims_%1$s (claim_no)', s);
        EXECUTE format('CREATE INDEX ON awa_internal.claims_%1$s (expires_at)', s);
        EXECUTE format('CREATE INDEX ON awa_internal.closures_%1$s (claim_no)', s);
    END LOOP;
END
$slots$;

SELECT pg_extension_config_dump('awa_internal.queues', '');
SELECT pg_extension_config_dump('awa_internal.lanes', '');
SELECT pg_extension_config_dump('awa_internal.ring', '');
SELECT pg_extension_config_dump('awa_internal.queue_totals', '');
-- A dump may copy a slot's tables after they were emptied: what its snapshot still has of the slot is the sums.
SELECT pg_extension_config_dump('awa_internal.slot_sums', '');
SELECT pg_extension_config_dump('awa_internal.finished_slots', '');
SELECT pg_extension_config_dump('awa_internal.count_changes', '');
SELECT pg_extension_config_dump('awa_internal.count_changes_change_no_seq', '');
SELECT pg_extension_config_dump('awa_internal.deferred', '');
SELECT pg_extension_config_dump('awa_internal.expiries', '');
SELECT pg_extension_config_dump('awa_internal.dead_letters', '');
SELECT pg_extension_config_dump('awa_internal.attempts', '');
SELECT pg_extension_config_dump('awa_internal.queue_ids', '');
SELECT pg_extension_config_dump('awa_internal.entry_ids', '');
SELECT pg_extension_config_dump('awa_internal.claim_blocks', '');

-- 30_produce.sql
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

-- 40_work.sql
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

-- 50_operate.sql
-- Operators.

CREATE FUNCTION awa.create_queue (
    queue text,
    settings jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_create_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.create_queue (text, jsonb, jsonb) IS
'Creates a queue with settings. True: created; false: it existed, nothing changed. Settings and their defaults: README. Unknown key or bad value: 22023. Another transaction that is just creating it is waited for one second, then 55P03.';

CREATE FUNCTION awa.alter_queue (
    queue text,
    settings jsonb,
    options jsonb DEFAULT NULL
) RETURNS jsonb
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_alter_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.alter_queue (text, jsonb, jsonb) IS
'Changes settings of a queue (a key with null goes back to its default) and returns the effective settings. 42704 no such queue, 22023 unknown key or bad value. shards may only grow.';

CREATE FUNCTION awa.drop_queue (
    queue text,
    force boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_drop_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.drop_queue (text, boolean, jsonb) IS
'Drops a queue. 0A000 until built.';

CREATE FUNCTION awa.pause_queue (
    queue text,
    reason text DEFAULT NULL,
    kind text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_pause_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.pause_queue (text, text, text, jsonb) IS
'Stops claims from a queue; enqueue and finish go on. True if it was not paused. A kind: 0A000 until built.';

CREATE FUNCTION awa.resume_queue (
    queue text,
    kind text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_resume_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.resume_queue (text, text, jsonb) IS
'Lets claims from a queue go on. True if it was paused.';

CREATE FUNCTION awa.redrive (
    queue text,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    to_queue text DEFAULT NULL,
    spread interval DEFAULT NULL,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_redrive'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.redrive (text, jsonb, bigint, text, interval, boolean, jsonb) IS
'Dead letters back to ready. 0A000 until built.';

CREATE FUNCTION awa.purge (
    queue text,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_purge'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.purge (text, jsonb, bigint, boolean, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.cancel_where (
    queue text,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_cancel_where'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.cancel_where (text, jsonb, bigint, boolean, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.retry_where (
    queue text,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_retry_where'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.retry_where (text, jsonb, bigint, boolean, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.move (
    queue text,
    to_queue text,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_move'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.move (text, text, jsonb, bigint, boolean, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.set_priority (
    queue text,
    priority bigint,
    filter jsonb DEFAULT NULL,
    max_jobs bigint DEFAULT 10000,
    dry_run boolean DEFAULT false,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_set_priority'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.set_priority (text, bigint, jsonb, bigint, boolean, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.expire_leases (
    worker text,
    options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_expire_leases'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.expire_leases (text, jsonb) IS
'Ends the leases of all jobs that a worker holds by this name, for a host that is known to be dead: they are rescued at once, whatever their lease and its heartbeats say. Returns how many, at most 10,000 a call: call again until 0. What another transaction is just ending is left alone. Errors: 22004 worker null.';

CREATE FUNCTION awa.schedule (
    name text,
    cron text,
    queue text,
    args jsonb DEFAULT '{}',
    kind text DEFAULT NULL,
    timezone text DEFAULT 'UTC',
    missed text DEFAULT 'one',
    job jsonb DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_schedule'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.schedule (text, text, text, jsonb, text, text, text, jsonb, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.unschedule (
    name text,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_unschedule'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.unschedule (text, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.grant_queue (
    role_name text,
    capability text,
    queue text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_grant_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.grant_queue (text, text, text, jsonb) IS
'0A000 until built.';

CREATE FUNCTION awa.revoke_queue (
    role_name text,
    capability text,
    queue text DEFAULT NULL,
    options jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_revoke_queue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.revoke_queue (text, text, text, jsonb) IS
'0A000 until built.';

CREATE PROCEDURE awa.maintain (
    options jsonb DEFAULT NULL
)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_maintain';
COMMENT ON PROCEDURE awa.maintain (jsonb) IS
'Does all maintenance that is due, once, each step in its own transaction, as the background worker does: folds counts, refreshes statistics, seals the current slot when it is large or old, closes sealed slots, empties finished ones. A duty that fails is a WARNING and stops no other. Not in a transaction block (25001).';

-- 60_maintenance.sql
-- Single steps of maintenance, for the owner. Each is meant for a transaction of its own, in READ COMMITTED;
-- none waits for anybody; each returns in words what it did or why it did nothing.

CREATE FUNCTION awa_internal.seal () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_seal'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.seal () IS
'Makes an empty slot the current one. Returns: sealed: slot N is current | no empty slot | busy.';

CREATE FUNCTION awa_internal.close (slot integer) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_close'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.close (integer) IS
'Closes a sealed slot that no open transaction has written into. Returns: closed | current | not open | writers left | busy.';

CREATE FUNCTION awa_internal."empty" (slot integer, ignore_retention boolean DEFAULT false) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_empty'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal."empty" (integer, boolean) IS
'Empties a closed slot of which every job has ended. Returns: emptied | current | not closed | open: X of Y | retained | snapshot | blocked | busy.';

CREATE FUNCTION awa_internal.adopt () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_adopt'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.adopt () IS
'Takes over tables that came from elsewhere (a logical subscriber before its first verb, a restore of the data alone): sequences above every number in use, a fresh incarnation. Returns: adopted | busy. 25001 outside READ COMMITTED.';

CREATE FUNCTION awa_internal.rescue () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_rescue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.rescue () IS
'Ends attempts whose lease is over, about 1,000 at a time. Returns: rescued: N | rescued: N, more.';

CREATE FUNCTION awa_internal.promote () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_promote'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.promote () IS
'Makes deferred jobs ready whose time has come, about 1,000 at a time. Returns: promoted: N | promoted: N, more. 25001 outside READ COMMITTED.';

CREATE FUNCTION awa_internal.lane_state (lane_id bigint) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_lane_state'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.lane_state (bigint) IS
'The unresolved ranges of a lane that a claim of this session would start from, for debugging.';

-- Whoever writes the ring or the identity (COPY of a restore, an administrator) makes all sessions read them again.
CREATE FUNCTION awa_internal.ring_changed () RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_ring_changed';
COMMENT ON FUNCTION awa_internal.ring_changed () IS 'Statement trigger: makes all sessions read the ring again.';

CREATE TRIGGER ring_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa_internal.ring
FOR EACH STATEMENT EXECUTE FUNCTION awa_internal.ring_changed();
CREATE TRIGGER ring_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa_internal.world
FOR EACH STATEMENT EXECUTE FUNCTION awa_internal.ring_changed();

-- 70_read.sql
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

-- 90_rights.sql
-- Nothing is granted to PUBLIC, not even EXECUTE. A role that works with queues needs USAGE on schema awa and
-- EXECUTE on the verbs that it may use, and no right on any table: the verbs write the logs natively and
-- run their few statements on other tables as the owner. awa_internal is for the owner alone.
REVOKE ALL ON SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL ROUTINES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON TYPE awa_internal.job_rest FROM PUBLIC;
