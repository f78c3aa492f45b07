-- What the files behind this one use. In a schema of its own, which no search_path names.
CREATE SCHEMA t;

-- Runs a statement and says how it ended: 'ok', or the error's SQLSTATE, message, and whether a DETAIL or HINT helps on.
CREATE FUNCTION t.try(statement text, OUT code text, OUT help boolean, OUT message text)
LANGUAGE plpgsql AS $$
DECLARE
    detail text;
    hint text;
BEGIN
    EXECUTE statement;
    code := 'ok';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    help := detail <> '' OR hint <> '';
END $$;

-- The same for many statements, in their order.
CREATE FUNCTION t.try_all(VARIADIC statements text[])
RETURNS TABLE (statement text, code text, help boolean, message text)
LANGUAGE plpgsql AS $$
BEGIN
    FOREACH statement IN ARRAY statements LOOP
        SELECT a.code, a.help, a.message INTO code, help, message FROM t.try(statement) a;
        RETURN NEXT;
    END LOOP;
END $$;

-- Receipts are kept here: they differ from run to run and are never printed.
CREATE TABLE t.held (queue text, args jsonb, receipt bigint, job_id bigint);

-- Claims and keeps the receipts; returns the args in the order of the rows.
CREATE FUNCTION t.take(queue text, max_jobs bigint DEFAULT 1) RETURNS SETOF jsonb
LANGUAGE plpgsql AS $$
DECLARE
    job record;
BEGIN
    FOR job IN SELECT * FROM awa.claim(take.queue, take.max_jobs) LOOP
        INSERT INTO t.held VALUES (job.queue, job.args, job.receipt, job.job_id);
        RETURN NEXT job.args;
    END LOOP;
END $$;

-- The receipt of the job with these args, and of several in the order asked for.
CREATE FUNCTION t.receipt(queue text, args jsonb) RETURNS bigint
LANGUAGE sql AS 'SELECT h.receipt FROM t.held h WHERE h.queue = $1 AND h.args = $2';
CREATE FUNCTION t.receipts(queue text, VARIADIC args jsonb[]) RETURNS bigint[]
LANGUAGE sql AS 'SELECT array_agg(t.receipt($1, a) ORDER BY no) FROM unnest($2) WITH ORDINALITY AS u (a, no)';
