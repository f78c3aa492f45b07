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
