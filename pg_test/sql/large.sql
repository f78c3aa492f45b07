-- A batch may have 100,000 jobs and not one more, in each of the forms.
SELECT cardinality(awa.enqueue_batch('l.batch', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 100000) i))) AS n;
SELECT * FROM t.try($$SELECT awa.enqueue_batch('l.batch', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 100001) i))$$);
SELECT count(*), count(DISTINCT args), min(args::int), max(args::int), count(DISTINCT receipt), count(DISTINCT job_id)
FROM awa.claim('l.batch', 60000);
CREATE TEMP TABLE got AS SELECT row_number() OVER () AS no, args::int AS n, receipt FROM awa.claim('l.batch', 100000);
SELECT count(*), bool_and(no + 60000 = n) AS in_order FROM got;
SELECT state, changed, count(*) FROM awa.complete(ARRAY(SELECT receipt FROM got)) GROUP BY 1, 2;
SELECT state, changed, count(*) FROM awa.complete(ARRAY(SELECT receipt FROM got)) GROUP BY 1, 2;

SELECT count(*), count(DISTINCT job_id), max(idx) FROM awa.enqueue_jobs(
    (SELECT jsonb_agg(jsonb_build_object('queue', 'l.jobs' || i % 3, 'args', i)) FROM generate_series(1, 100000) i));
SELECT * FROM t.try($$SELECT awa.enqueue_jobs((SELECT jsonb_agg('{"queue": "l.jobs0"}'::jsonb) FROM generate_series(1, 100001)))$$);
SELECT count(*), count(DISTINCT job_id) FROM awa.claim_from('{l.jobs0,l.jobs1,l.jobs2}', 100000);
SELECT count(*) FROM awa.claim_from('{l.jobs0,l.jobs1,l.jobs2}', 100000);
