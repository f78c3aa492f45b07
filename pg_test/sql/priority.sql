-- Which lane a claim takes from: effective priority, then the age of the head.
SELECT awa.create_queue('o.plain', '{"aging_interval": "1 h"}');
SELECT awa.enqueue('o.plain', to_jsonb(p || ' ' || i), priority => p) > 0 AS id FROM generate_series(1, 2) i, unnest(array[4, 3, 2, 1]) p;
SELECT args #>> '{}' AS args, priority, effective_priority FROM awa.claim('o.plain', 3);
SELECT args #>> '{}' AS args, priority, effective_priority FROM awa.claim('o.plain', 9);

-- The queue's own priority is the default of its jobs.
SELECT awa.create_queue('o.own', '{"priority": 4, "max_attempts": 3}');
SELECT awa.enqueue('o.own') > 0 AS id, awa.enqueue('o.own', priority => 1, max_attempts => 1000) > 0 AS id;
SELECT priority, max_attempts FROM awa.claim('o.own', 2);

-- Waiting raises a job, one step for each aging_interval, never above 1: the old job of priority 4 goes before the young one
-- of priority 2.
SELECT awa.create_queue('o.aged', '{"aging_interval": "5 ms"}');
SELECT awa.enqueue('o.aged', '"old"', priority => 4) > 0 AS id;
SELECT pg_sleep(0.05);
SELECT awa.enqueue('o.aged', '"young"', priority => 2) > 0 AS id;
SELECT args, priority, effective_priority < priority AS raised, effective_priority >= 1 AS in_range FROM awa.claim('o.aged');
SELECT pg_sleep(0.05);
SELECT args, priority, effective_priority FROM awa.claim('o.aged', 2);

-- Without aging (0) priority stays what it is, however long a job waits.
SELECT awa.create_queue('o.never', '{"aging_interval": "0"}');
SELECT awa.enqueue('o.never', '"old"', priority => 4) > 0 AS id;
SELECT pg_sleep(0.05);
SELECT awa.enqueue('o.never', '"young"', priority => 3) > 0 AS id;
SELECT args, priority, effective_priority FROM awa.claim('o.never', 2);

-- Jobs of one ordering key stay in order in a queue of many shards, and all shards are emptied.
SELECT awa.create_queue('o.shards', '{"shards": 8}');
SELECT cardinality(awa.enqueue_batch('o.shards', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 400) i),
                                     ordering_keys => ARRAY(SELECT 'key ' || i % 20 FROM generate_series(1, 400) i))) AS n;
SELECT awa.enqueue('o.shards', to_jsonb(i), ordering_key => 'key ' || i % 20) IS NULL AS id FROM generate_series(401, 440) i GROUP BY 1;
CREATE TEMP TABLE got AS SELECT row_number() OVER () AS no, args::int AS n, ordering_key FROM awa.claim('o.shards', 300);
INSERT INTO got SELECT 300 + row_number() OVER (), args::int, ordering_key FROM awa.claim('o.shards', 300);
SELECT count(*), count(DISTINCT n), bool_and(in_order) FROM (
    SELECT n, n > lag(n, 1, 0) OVER (PARTITION BY ordering_key ORDER BY no) AS in_order FROM got) g;
SELECT count(DISTINCT lane_id) > 1 AS several_lanes FROM awa_internal.segments s
JOIN awa_internal.queues q ON q.queue_id = s.lane_id / 256 WHERE q.name = 'o.shards';

-- Without a key jobs go round the shards.
SELECT count(awa.enqueue('o.shards', to_jsonb(i))) FROM generate_series(1, 16) i;
SELECT count(*), count(DISTINCT args) FROM awa.claim('o.shards', 99);

-- Several queues in one claim: by effective priority, within each queue's share.
SELECT awa.enqueue_batch('o.x', array['"x low 1"', '"x low 2"']::jsonb[], priority => 4) IS NOT NULL AS x,
       awa.enqueue_batch('o.y', array['"y high 1"', '"y high 2"']::jsonb[], priority => 1) IS NOT NULL AS y;
SELECT args FROM awa.claim_from('{o.x,o.y}', 2);
SELECT args FROM awa.claim_from('{o.x,o.y}', 3);
