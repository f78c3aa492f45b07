-- The contract: names, parameters, defaults, result columns. Neither a parameter nor a result column can be added later, so a
-- difference here is a break of the contract, and the expected file changes for a new verb only.
\pset format unaligned
\pset tuples_only on

SELECT p.proname || E'(\n    '
       || replace(replace(regexp_replace(pg_get_function_arguments(p.oid), '::[a-z ]+(\[\])?', '', 'g'), ', ', E'\n    '),
                  'timestamp with time zone', 'timestamptz') || ')'
       || coalesce(E'\n  returns ' || replace(pg_get_function_result(p.oid), 'timestamp with time zone', 'timestamptz'),
                   E'\n  procedure')
FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace
ORDER BY p.proname COLLATE "C";

-- The views.
SELECT relname || E'(\n    ' || string_agg(attname || ' ' || format_type(atttypid, NULL), E'\n    ' ORDER BY attnum) || ')'
FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid AND attnum > 0
WHERE relnamespace = 'awa'::regnamespace GROUP BY relname ORDER BY relname COLLATE "C";

-- One function of a name: no overload makes a literal ambiguous.
SELECT proname FROM pg_proc WHERE pronamespace = 'awa'::regnamespace GROUP BY 1 HAVING count(*) > 1;

-- No STRICT: NULL for an optional parameter means its default. Parallel workers may not run them, but for what only computes.
SELECT proname, proisstrict, proparallel FROM pg_proc
WHERE pronamespace = 'awa'::regnamespace AND (proisstrict OR proparallel <> 'u');

-- The last parameter is options jsonb DEFAULT NULL and the last result column extra jsonb; those without are readers.
SELECT 'no options: ' || proname FROM pg_proc
WHERE pronamespace = 'awa'::regnamespace
  AND NOT pg_get_function_identity_arguments(oid) LIKE '%options jsonb'
ORDER BY proname COLLATE "C";
SELECT 'no extra: ' || proname FROM pg_proc
WHERE pronamespace = 'awa'::regnamespace AND proretset AND NOT pg_get_function_result(oid) LIKE '%, extra jsonb)'
ORDER BY proname COLLATE "C";

-- Whole numbers are bigint in parameters, never int4 or numeric; times are timestamptz and interval.
SELECT DISTINCT format_type(a.type, NULL)
FROM pg_proc p, unnest(p.proargtypes) AS a (type)
WHERE p.pronamespace = 'awa'::regnamespace ORDER BY 1;
-- Results are of built-in types only, so a client needs no type of ours.
SELECT DISTINCT proname, format_type(a.type, NULL)
FROM pg_proc p, unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]) || p.prorettype) AS a (type) JOIN pg_type t ON t.oid = a.type
WHERE p.pronamespace = 'awa'::regnamespace AND t.typnamespace <> 'pg_catalog'::regnamespace;

-- Every verb says by a comment what it does.
SELECT proname FROM pg_proc p
WHERE pronamespace = 'awa'::regnamespace AND coalesce(obj_description(p.oid, 'pg_proc'), '') = '' ORDER BY 1;
SELECT relname FROM pg_class c
WHERE relnamespace = 'awa'::regnamespace AND coalesce(obj_description(c.oid, 'pg_class'), '') = '' ORDER BY 1;

-- Schema awa holds nothing else: no table, sequence or type of one's own.
SELECT DISTINCT relkind FROM pg_class WHERE relnamespace = 'awa'::regnamespace;
SELECT typname FROM pg_type t WHERE typnamespace = 'awa'::regnamespace
  AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.typrelid) AND typelem = 0;
