-- Complain if the script is sourced in psql rather than by CREATE EXTENSION.
\echo Use "CREATE EXTENSION awa_queue" to load this file. \quit

-- The control file names pg_catalog, so the search_path of this script is pg_catalog alone and nothing
-- that somebody created beforehand can be picked up by an unqualified name. Every object below is
-- qualified, and CREATE SCHEMA without IF NOT EXISTS fails where somebody prepared a schema of that name.

CREATE SCHEMA awa;
COMMENT ON SCHEMA awa IS 'awa_queue: the API. Tables live in awa_internal.';

CREATE SCHEMA awa_internal;
COMMENT ON SCHEMA awa_internal IS 'awa_queue: tables and maintenance steps. Nobody needs USAGE here.';
