-- What awa_queue is measured against, in the same server and database.

-- 1. fold: the same storage and the same steps in plpgsql. Tables of the same shape; the lane lock is an advisory
-- lock that is held to COMMIT, because SQL can't give a lock back earlier and still be safe.
CREATE SCHEMA fold;
CREATE SEQUENCE fold.entry_ids INCREMENT 1024 MINVALUE 1024 START 1024;
CREATE SEQUENCE fold.claim_nos;
CREATE TABLE fold.ready (
    entry_id bigint NOT NULL, job_id bigint, slot smallint NOT NULL, attempt smallint NOT NULL,
    max_attempts smallint NOT NULL, kind text, args jsonb NOT NULL, rest text);
CREATE INDEX ON fold.ready (job_id) WHERE job_id IS NOT NULL;
CREATE TABLE fold.segments (
    lane_id bigint NOT NULL, first_seq bigint NOT NULL, first_entry_id bigint NOT NULL, enqueued_at timestamptz NOT NULL,
    slot smallint NOT NULL, n smallint NOT NULL, first_tid tid NOT NULL, last_tid tid NOT NULL);
CREATE INDEX ON fold.segments (lane_id, first_seq);
CREATE INDEX ON fold.segments (first_entry_id);
CREATE TABLE fold.claims (
    claim_no bigint NOT NULL, lane_id bigint NOT NULL, first_seq bigint NOT NULL, claimed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL, slot smallint NOT NULL, n smallint NOT NULL, worker text);
CREATE INDEX ON fold.claims (lane_id, first_seq);
CREATE INDEX ON fold.claims (claim_no);
CREATE INDEX ON fold.claims (expires_at);
CREATE TABLE fold.closures (
    claim_no bigint NOT NULL, closed_at timestamptz NOT NULL, slot smallint NOT NULL, n smallint NOT NULL,
    outcome "char" NOT NULL, which bytea, reason text);
CREATE INDEX ON fold.closures (claim_no);

CREATE FUNCTION fold.enqueue (lane bigint, jobs jsonb[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    first_entry bigint := nextval('fold.entry_ids') - 1023;
    next_seq bigint;
    low tid;
    high tid;
BEGIN
    WITH written AS (
        INSERT INTO fold.ready (entry_id, slot, attempt, max_attempts, args)
        SELECT first_entry + k - 1, 0, 1, 25, job FROM unnest(jobs) WITH ORDINALITY AS u (job, k)
        RETURNING ctid)
    SELECT min(ctid), max(ctid) INTO low, high FROM written;
    PERFORM pg_advisory_xact_lock(1, lane::int);
    SELECT first_seq + n INTO next_seq FROM fold.segments WHERE lane_id = lane ORDER BY first_seq DESC LIMIT 1;
    INSERT INTO fold.segments VALUES
        (lane, coalesce(next_seq, 1), first_entry, clock_timestamp(), 0, cardinality(jobs), low, high);
    RETURN ARRAY(SELECT generate_series(first_entry, first_entry + cardinality(jobs) - 1));
END $$;

CREATE FUNCTION fold.claim (lane bigint, max_jobs bigint)
RETURNS TABLE (receipt bigint, job_id bigint, args jsonb) LANGUAGE plpgsql AS $$
DECLARE
    pos bigint;
    taken int := 0;
    number bigint;
    s record;
BEGIN
    PERFORM pg_advisory_xact_lock(2, lane::int);
    SELECT c.first_seq + c.n INTO pos FROM fold.claims AS c WHERE c.lane_id = lane ORDER BY c.first_seq DESC LIMIT 1;
    pos := coalesce(pos, 1);
    FOR s IN SELECT g.* FROM fold.segments AS g
             WHERE g.lane_id = lane AND g.first_seq > pos - 1024 AND g.first_seq < pos + max_jobs AND g.first_seq + g.n > pos
             ORDER BY g.first_seq
    LOOP
        EXIT WHEN taken >= max_jobs;
        number := coalesce(number, nextval('fold.claim_nos'));
        RETURN QUERY
            SELECT number << 16 | (r.entry_id - s.first_entry_id + s.first_seq - pos), coalesce(r.job_id, r.entry_id), r.args
            FROM fold.ready AS r
            WHERE r.ctid BETWEEN s.first_tid AND s.last_tid
              AND r.entry_id BETWEEN s.first_entry_id + greatest(pos - s.first_seq, 0)
                                 AND s.first_entry_id + least(s.n, pos + max_jobs - s.first_seq) - 1;
        taken := least(s.first_seq + s.n - pos, max_jobs);
    END LOOP;
    IF taken > 0 THEN
        INSERT INTO fold.claims VALUES
            (number, lane, pos, clock_timestamp(), clock_timestamp() + interval '5 minutes', 0, taken, NULL);
    END IF;
END $$;

CREATE FUNCTION fold.complete (receipts bigint[])
RETURNS TABLE (receipt bigint, state text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(3, (r >> 16)::int) FROM (SELECT DISTINCT unnest(receipts) AS r) AS u;
    INSERT INTO fold.closures
        SELECT r >> 16, clock_timestamp(), 0, count(*), 'c' FROM unnest(receipts) AS r
        WHERE NOT EXISTS (SELECT FROM fold.closures AS c WHERE c.claim_no = r >> 16) GROUP BY r >> 16;
    RETURN QUERY SELECT r, 'completed' FROM unnest(receipts) AS r;
END $$;

-- 2. skip: what most people write: one table, UPDATE and FOR UPDATE SKIP LOCKED.
CREATE SCHEMA skip;
CREATE TABLE skip.jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, state text NOT NULL DEFAULT 'ready',
    attempt smallint NOT NULL DEFAULT 0, max_attempts smallint NOT NULL DEFAULT 25, args jsonb NOT NULL,
    enqueued_at timestamptz NOT NULL DEFAULT now(), claimed_at timestamptz, finished_at timestamptz, worker text);
CREATE INDEX ON skip.jobs (queue, id) WHERE state = 'ready';

CREATE FUNCTION skip.enqueue (q text, jobs jsonb[]) RETURNS bigint[] LANGUAGE sql AS $$
    WITH i AS (INSERT INTO skip.jobs (queue, args) SELECT q, job FROM unnest(jobs) AS job RETURNING id)
    SELECT array_agg(id) FROM i
$$;
CREATE FUNCTION skip.claim (q text, max_jobs bigint) RETURNS TABLE (receipt bigint, args jsonb) LANGUAGE sql AS $$
    UPDATE skip.jobs SET state = 'running', attempt = attempt + 1, claimed_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM skip.jobs WHERE queue = q AND state = 'ready' ORDER BY id LIMIT max_jobs
                          FOR UPDATE SKIP LOCKED))
    RETURNING id, args
$$;
CREATE FUNCTION skip.complete (ids bigint[]) RETURNS TABLE (receipt bigint, state text) LANGUAGE sql AS $$
    UPDATE skip.jobs SET state = 'completed', finished_at = now() WHERE id = ANY (ids) AND state = 'running'
    RETURNING id, state
$$;

-- Loops for the time of a call in the server: each turn ends with COMMIT, so the client has no part in it.
CREATE SCHEMA turns;
CREATE TABLE turns.payload (n int PRIMARY KEY, jobs jsonb[] NOT NULL);
CREATE PROCEDURE turns.nothing (turns int) LANGUAGE plpgsql AS $$
BEGIN FOR i IN 1..turns LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$;
