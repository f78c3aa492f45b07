-- Creates the extension for the tests behind this one, and shows what a user sees of it at first.
CREATE EXTENSION awa_queue;
SELECT extversion = default_version AS newest, extrelocatable
FROM pg_extension JOIN pg_available_extensions ON name = extname WHERE extname = 'awa_queue';

-- Its schemas, and who may look into them.
SELECT n.nspname, has_schema_privilege('public', n.oid, 'USAGE') AS public_usage,
       has_schema_privilege('public', n.oid, 'CREATE') AS public_create
FROM pg_namespace n WHERE n.nspname LIKE 'awa%' ORDER BY 1;

-- Nothing is granted to PUBLIC, not even EXECUTE.
SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname LIKE 'awa%' AND has_function_privilege('public', p.oid, 'EXECUTE') ORDER BY 1::text COLLATE "C";

-- Everything in the two schemas belongs to the extension: it goes when the extension goes.
DROP EXTENSION awa_queue;
SELECT nspname FROM pg_namespace WHERE nspname LIKE 'awa%';
CREATE EXTENSION awa_queue;
