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
