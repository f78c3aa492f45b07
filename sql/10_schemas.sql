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
